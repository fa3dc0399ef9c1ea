"""The training data of a run: tokenizer, samples, and global batches.

Config -> load_tokenizer
       -> load_training_data  samples (SFT), rollouts (RL), or prompts for which the run generates rollouts
       -> make_batcher        global batches of groups, the same on every rank
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from padfree.batch import Sample
from padfree.config import Config
from padfree.config.hub import check_name
from padfree.config.model_folder import check_tokenizer_files
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
from padfree.rollout.collect.group import RolloutGroup
from padfree.tasks import task_of
from padfree.tasks.batch_advantages import check_signal
from padfree.tasks.reading import Samples, TrainingData, text_settings
from padfree.train.data_rows import Group, Rows, epoch_parts, in_rows, row_counts, row_starts

Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


UNGROUPED = ("reinforce++", "gae", "teacher", "given")
"""Advantages that do not compare the samples of a group."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer of `model.tokenizer`, or else the model's own. None for rollout files if there is neither."""
    if not check_tokenizer_files(config):
        return None
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    return open_tokenizer(config.model.tokenizer or config.model.path, field, config.model.trust_remote_code)


def open_tokenizer(name: str, setting: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or Hub id. An error in its files becomes a `UserError` about `setting`."""
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
    """Load the samples or prompts of `data.path` or of all `data.sources`, with a report about their rows.

    `progress` shows the progress of tokenisation. With prompts, the reward is imported first, so that an error in it
    shows early; `import_reward=False` skips this. `day`: the date for chat templates; None: today.
    """
    found = _load(config, tokenizer, {"progress": progress or False, "import_reward": import_reward, "day": day})
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
        return read(config, tokenizer, **options)
    found: dict[str, TrainingData] = {}
    for number, source in enumerate(config.data.sources):
        try:
            one = read(replace(config, data=config.data.of_source(source)), tokenizer, **options)
        except UserError as error:
            raise _of_data_source(error, number) from error
        found[source.label] = one
    return mixed(found)


def _of_data_source(error: UserError, number: int) -> UserError:
    """Turn an error about a `[data]` setting into one about the same setting of source `number`, if sources have it."""
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
    """The data of `eval.path`, read like training data; None if it is not set."""
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
    """The first `eval.samples` samples: whole rows, counted like `batch.samples`."""
    assert config.eval.samples is not None
    starts, size = row_starts(config, samples), config.loss.task.group_size
    count = starts[min(config.eval.samples // size, len(starts) - 1)]
    return [samples[index] for index in range(int(count))]


def longest_of(samples: Samples) -> int:
    """Number of tokens of the longest sample, or of the longest prompt."""
    if isinstance(samples, StoredSamples):
        return int(samples.lengths.max(initial=0))
    return max((len(sample.tokens) for sample in samples), default=0)


def check_rollouts(config: Config, source: TrainingData) -> str | None:
    """Refuse rollout files without any learning signal; return a note if only part of them have one."""
    if config.loss.task.in_rows or config.rollout.source is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.paths))


def make_batcher(config: Config, samples: Samples, parts: Sequence[int] = ()) -> Batcher:
    """Make global batches: of whole groups for RL, of whole data rows otherwise.

    A prompt is a group of its own (`RolloutGroup`). `parts`: see `TrainingData`.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise UserError("data.path", f"{', '.join(data.paths)} has no samples", "give files with at least one sample")
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    groups, sizes = groups_of(config, samples, parts)
    order["parts"] = epoch_parts(config, sizes)
    if in_rows(config):
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
    # The budget counts samples here: a batch takes as many whole groups as fit.
    return TokenBudgetBatcher(groups, budget=batch.samples, buffer_size=1, length=len, **order)


def groups_of(config: Config, samples: Samples, parts: Sequence[int] = ()) -> tuple[Sequence[Group], list[int]]:
    """The units of batches (data rows or groups), and how many come from each part of the samples."""
    if in_rows(config):
        starts = row_starts(config, samples)
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
