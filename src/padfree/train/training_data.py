"""The training data of a run: tokenizer, samples, and global batches.

Config -> load_tokenizer
       -> load_training_data  samples (SFT), rollouts (RL), or prompts for which the run generates rollouts
       -> make_batcher        global batches of groups, the same on every rank
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from padfree.config import Config
from padfree.config.hub import check_name
from padfree.config.model_folder import check_tokenizer_files
from padfree.config.reader import LARGEST_COUNT
from padfree.data import (
    DataReport,
    MixedDataset,
    RolloutDataSettings,
    StoredSamples,
    labelled,
    of_source,
)
from padfree.data.chat_renderer import chat_renderer
from padfree.data.prepare import Progress
from padfree.errors import UserError, shown_error
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.rollout import Prompt
from padfree.rollout.group import RolloutGroup
from padfree.sample import Sample
from padfree.tasks import task_of
from padfree.tasks.batch_advantages import check_signal
from padfree.tasks.reading import Samples, TrainingData, text_settings
from padfree.train.data_rows import Group, Rows, epoch_parts, in_rows, lengths_of, row_counts, row_starts
from padfree.train.image_settings import image_settings

Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


BYTES_PER_TOKEN = 9
"""Bytes of host memory per token of a step: an id, a mask and a log-probability."""

UNGROUPED = ("reinforce++", "gae", "teacher", "given")
"""Advantages that do not compare the samples of a group."""


def load_tokenizer(config: Config) -> Any:
    """Load the tokenizer that `model.tokenizer` names, or else the model's own.

    Returns None if there is neither, which is allowed for rollout files.
    """
    if not check_tokenizer_files(config):
        return None
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    found = open_tokenizer(config.model.tokenizer or config.model.path, field, config.model.trust_remote_code)
    if (images := image_settings(config.model, config.data)) is not None:
        images.processor.give_template(found)
    return found


def open_tokenizer(name: str, setting: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of `name`, a folder or Hub id. An error in its files becomes a `UserError` about `setting`."""
    check_name(name, setting)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the files may hold anything, and each reader raises its own kind of error
        raise UserError(
            setting, f"the tokenizer of {name} cannot be read ({shown_error(error)})", "give another tokenizer"
        ) from error


def load_training_data(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData:
    """Load the samples or prompts of `data.path` or of all `data.sources`, with a report about unused rows.

    `progress` shows the progress of tokenisation. If the data are prompts, the reward function is imported before they
    are read, so that an error in it shows early; `import_reward=False` skips the import. `day`: the date for chat
    templates; None: today.
    """
    options: dict[str, Any] = {"progress": progress or False, "import_reward": import_reward, "day": day}
    if (images := image_settings(config.model, config.data)) is not None:
        options["images"] = images
    found = _load(config, tokenizer, options)
    chat = None
    if tokenizer is not None:
        chat = chat_renderer(tokenizer, RolloutDataSettings(**text_settings(config.data, day)), day=day)
    if chat is None or not chat.depends_on_day:
        return found
    note = f"data: the chat template writes the date; this run uses {chat.day.isoformat()}, also after a resume"
    return replace(found, day=chat.day, notes=(*found.notes, note))


def _load(config: Config, tokenizer: Any, options: Mapping[str, Any]) -> TrainingData:
    read = task_of(config.loss.command).read
    if not config.data.sources:
        return read(config.data, config.rollout, tokenizer, **options)
    found: dict[str, TrainingData] = {}
    for number, source in enumerate(config.data.sources):
        try:
            one = read(config.data.of_source(source), config.rollout, tokenizer, **options)
        except UserError as error:
            raise _of_data_source(error, number) from error
        found[source.label] = one
    return mixed(found)


def _of_data_source(error: UserError, number: int) -> UserError:
    """Return the error for source `number` of a mixture.

    A setting that each source has, such as `data.path`, gets the name that it has in this source:
    `data.sources.1.path`.
    """
    own, table = "data.(path|columns|split|subset)", f"data.sources.{number}"
    at = f"{table}.path" if error.setting == "data" else re.sub(rf"^{own}$", rf"{table}.\1", error.setting)
    problem, fix = (re.sub(rf"{own}(?=[=.])", rf"{table}.\1", text) for text in (error.problem, error.fix))
    return UserError(at, problem, fix, error.value)


def mixed(found: Mapping[str, TrainingData]) -> TrainingData:
    """Concatenate the data of several named sources. Each sample carries the name of its source."""
    each = list(found.items())
    parts = tuple(len(one.samples) for _, one in each)
    if len(each) == 1:
        return replace(each[0][1], parts=parts)
    about: dict[str, Any] = {
        "notes": tuple(note for _, one in each for note in one.notes),
        "given_ids": any(one.given_ids for _, one in each),
    }
    stored = {name: one.samples for name, one in each if isinstance(one.samples, StoredSamples)}
    if len(stored) == len(each):
        both = MixedDataset(stored)
        return TrainingData(samples=both, report=both.report, place=both.place, parts=parts, **about)
    samples = [_with_source(name, sample) for name, one in each for sample in one.samples]
    places = [(name, one, index) for name, one in each for index in range(len(one.samples))]

    def place(index: int) -> str:
        name, one, number = places[index]
        return labelled(name, one.place(number))

    report = DataReport.merged({name: one.report for name, one in each})
    return TrainingData(samples=samples, report=report, place=place, parts=parts, **about)


def _with_source(name: str, sample: Sample | Prompt) -> Sample | Prompt:
    if isinstance(sample, Prompt):
        return replace(sample, uid=labelled(name, sample.uid), source=name)
    return of_source(name, sample)


def load_held_out(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData | None:
    """Load the data of `eval.path`, like `load_training_data`. Return None if `eval.path` is not set."""
    settings = config.eval
    if not settings.path:
        return None
    held_out_config = config.with_held_out_data()
    try:
        found = load_training_data(held_out_config, tokenizer, progress=progress, import_reward=import_reward, day=day)
    except UserError as error:
        raise error.at("eval.path", "data") from error
    found = replace(found, notes=tuple(f"eval.path: {note.removeprefix('data: ')}" for note in found.notes))
    return found if settings.samples is None else replace(found, samples=_first(config, found.samples))


def _first(config: Config, samples: Samples) -> Samples:
    """Return the samples of the first data rows, up to `eval.samples` (which counts like `batch.samples`)."""
    assert config.eval.samples is not None
    starts, size = row_starts(config.loss, config.rollout, samples), config.loss.task.group_size
    count = starts[min(config.eval.samples // size, len(starts) - 1)]
    return [samples[index] for index in range(int(count))]


def longest_of(samples: Samples) -> int:
    """Return the number of tokens of the longest sample or prompt."""
    if isinstance(samples, StoredSamples):
        return int(samples.lengths.max(initial=0))
    return max((len(sample.tokens) for sample in samples), default=0)


def check_rollouts(config: Config, source: TrainingData) -> str | None:
    """Raise an error if no group of the rollout files has a learning signal; return a note if only some have one."""
    if config.loss.task.in_rows or config.rollout.source is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.paths))


def make_batcher(config: Config, samples: Samples, parts: Sequence[int] = ()) -> Batcher:
    """Return the batcher, which makes global batches of whole data rows or, in RL, of whole groups.

    A prompt is a group of its own (`RolloutGroup`). `parts`: the number of samples of each source of a mixture.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise UserError("data.path", f"{', '.join(data.paths)} has no samples", "give files with at least one sample")
    _check_step_memory(config, samples)
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    groups, sizes = groups_of(config, samples, parts)
    order["parts"] = epoch_parts(data, sizes)
    if in_rows(config.loss, config.rollout):
        if batch.samples is not None:
            size = config.loss.task.group_size
            return FixedSizeBatcher(groups, batch_size=batch.samples // size, length=_num_tokens, **order)
        assert batch.tokens is not None
        return TokenBudgetBatcher(
            groups,
            budget=batch.tokens,
            buffer_size=batch.buffer,
            overlong=batch.overlong,
            length=_num_tokens,
            **order,
        )
    assert batch.samples is not None
    largest = max(groups, key=len)
    if len(largest) > batch.samples:
        assert isinstance(largest[0], Sample), "batch.samples is a multiple of rollout.samples_per_prompt"
        raise UserError(
            "batch.samples",
            f"{batch.samples} is less than the {len(largest)} samples of group {largest[0].group!r}",
            f"give {len(largest)} or more",
        )
    # `length=len` makes the budget count samples instead of tokens: a batch takes as many whole groups as fit.
    return TokenBudgetBatcher(groups, budget=batch.samples, buffer_size=1, length=len, **order)


def _check_step_memory(config: Config, samples: Samples) -> None:
    """Raise a `UserError` if the samples of one step do not fit into this machine's memory."""
    lengths = lengths_of(samples)
    total = int(lengths.sum()) * (config.data.epochs or LARGEST_COUNT)
    if config.batch.samples is not None:
        name, size, tokens_each = "samples", config.batch.samples, float(lengths.mean())
    else:
        assert config.batch.tokens is not None
        name, size, tokens_each = "tokens", config.batch.tokens, 1.0
    needed = BYTES_PER_TOKEN * min(size * tokens_each, total)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        gib = f"{needed / 2**30:.3g} GiB of memory, but this machine has {memory / 2**30:.3g} GiB"
        most = int(memory / BYTES_PER_TOKEN / tokens_each)
        raise UserError(f"batch.{name}", f"a step of {size} {name} needs about {gib}", f"give at most {most}")


def groups_of(config: Config, samples: Samples, parts: Sequence[int] = ()) -> tuple[Sequence[Group], list[int]]:
    """Return the units of batches, which are data rows or groups, and the number of units of each source.

    `parts`: the number of samples of each source of a mixture.
    """
    if in_rows(config.loss, config.rollout):
        starts = row_starts(config.loss, config.rollout, samples)
        return Rows(samples, starts), row_counts(starts, parts)
    ends = np.cumsum(parts or [len(samples)]).tolist()
    by_part = [_groups(config, [samples[i] for i in range(a, b)]) for a, b in pairwise([0, *ends])]
    return [group for groups in by_part for group in groups], [len(groups) for groups in by_part]


def _num_tokens(group: Group) -> int:
    return sum(len(sample) for sample in group)


def _groups(config: Config, samples: Samples) -> list[Group]:
    """Group samples by `group`, in the order of each group's first sample."""
    alone: list[Group] = []
    grouped: dict[str | int | None, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample, Prompt):
            alone.append(RolloutGroup(prompt=sample, size=config.rollout.samples_per_prompt))
        elif config.loss.advantage in UNGROUPED:
            alone.append((sample,))
        else:
            grouped.setdefault(sample.group, []).append(sample)
    return [*alone, *grouped.values()]
