"""What a run is trained on: the tokenizer, the samples, and the global batches they come in.

Config -> load_tokenizer
       -> load_training_data       samples (SFT), rollouts (RL), or prompts that rollouts are still to be written to
       -> make_batcher      global batches of groups, the same on every rank
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from padfree.batch import Sample
from padfree.config import Config, DataConfig
from padfree.config.functions import model_of
from padfree.config.hub import check_name
from padfree.config.inputs import check_regular
from padfree.data import (
    DataReport,
    MixedDataset,
    RolloutDataSettings,
    SFTDataSettings,
    StoredSamples,
    TokenizedDataset,
    labelled,
    load_pairs,
    load_reward,
    load_sft,
    of_source,
    read_rollouts,
)
from padfree.data.chat import chat_renderer
from padfree.data.formats import reading_notes
from padfree.data.prepare import Progress
from padfree.data.store import read_metadata
from padfree.errors import UserError, shown_error
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.rollout import Prompt, read_prompts
from padfree.rollout.environment import load_episode
from padfree.train.rl.advantages import check_signal
from padfree.train.rows import GROUP_SIZES, Group, Rows, Samples, epoch_parts, in_rows, row_counts, row_starts

Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What a run is trained on. `parts`: how many samples come from each of `data.sources`, in order; () without."""

    samples: Samples
    report: DataReport
    place: Callable[[int], str]  # the file and line of a sample
    parts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # how the files are read
    day: datetime.date | None = None  # that a chat template has written; None: it writes none
    given_ids: bool = False  # token ids that no tokenizer of ours made


UNGROUPED = ("reinforce++", "gae", "teacher", "given")
"""Advantages that do not compare samples of a group."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer that `model.tokenizer` names, or the model's own; None for rollout files where the model has none.

    Those may be token ids. Where they are text after all, `read_rollouts` says that it needs one.
    """
    path = Path(config.model.tokenizer or config.model.path)
    if path.exists() and not has_tokenizer(path):
        given = config.loss.command == "rl" and config.rollout.source is None
        if given and config.model.tokenizer is None:
            return None
        raise UserError("model.tokenizer", f"{path} holds none", "give a folder or Hub id that does")
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    return open_tokenizer(config.model.tokenizer or config.model.path, field, config.model.trust_remote_code)


def has_tokenizer(path: str | Path) -> bool:
    """Whether a folder on this disk holds a tokenizer."""
    return Path(path).is_dir() and any(Path(path).glob("tokenizer*"))


def open_tokenizer(name: str, setting: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or a Hub id; what is wrong with its files is one line that begins with `setting`."""
    check_name(name, setting)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # its files may hold anything, and whatever reads them raises in its own way
        raise UserError(
            setting, f"the tokenizer of {name} cannot be read ({shown_error(error)})", "give another"
        ) from error


def text_settings(data: DataConfig, day: datetime.date | None = None) -> dict[str, Any]:
    """What `padfree.data` is told of how rows become tokens, a chat template's file read."""
    names = ("columns", "prompt_format", "append_eos", "split", "subset", "max_length", "overlong", "on_bad_row")
    chosen: dict[str, Any] = {name: getattr(data, name) for name in (*names, "turns", "system", "prompt_template")}
    chosen["day"] = day
    if data.chat_template is not None:
        chosen["chat_template"] = read_template(data.chat_template)
    return chosen


def read_template(name: str, setting: str = "data.chat_template") -> str:
    """The text of a file with a chat template."""
    path = Path(name).expanduser()
    check_regular(path, setting, once=False)
    try:
        text = path.read_text(encoding="utf-8")
        reason = None if text.strip() else "it is empty"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    if reason is not None:
        raise UserError(setting, f"{name} cannot be used ({reason})", "give a file with a template")
    return text


def load_training_data(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData:
    """The samples, or the prompts, of `data.path` or of all `data.sources`, and what became of their rows.

    `progress` is of the tokenising. With prompts the reward is imported first, unless that is not wanted: it is refused
    here rather than later. `day` is what a chat template takes for today; None: today.
    """
    found = _loaded(config, tokenizer, {"progress": progress or False, "import_reward": import_reward, "day": day})
    chat = None
    if tokenizer is not None:
        chat = chat_renderer(tokenizer, RolloutDataSettings(**text_settings(config.data, day)), day=day)
    if chat is None or not chat.depends_on_day:
        return found
    note = f"data: the chat template writes the date; this run writes {chat.day.isoformat()}, also when it is resumed"
    return replace(found, day=chat.day, notes=(*found.notes, note))


def _loaded(config: Config, tokenizer: Any, options: Mapping[str, Any]) -> TrainingData:
    read = READERS[config.loss.command]
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
    """An error about a setting of `[data]` that a source has itself, as one about the source."""
    own, table = "data.(path|columns|split|subset)", f"data.sources.{number}"
    at = f"{table}.path" if error.setting == "data" else re.sub(rf"^{own}$", rf"{table}.\1", error.setting)
    problem, fix = (re.sub(rf"{own}(?=[=.])", rf"{table}.\1", text) for text in (error.problem, error.fix))
    return UserError(at, problem, fix, error.value)


def mixed(found: Mapping[str, TrainingData]) -> TrainingData:
    """The data of several sources by name, one after the other. Their samples carry the name."""
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
    samples = [_named(name, sample) for name, one in each for sample in one.samples]
    places = [(name, one, index) for name, one in each for index in range(len(one.samples))]

    def place(index: int) -> str:
        name, one, number = places[index]
        return labelled(name, one.place(number))

    report = DataReport.merged({name: one.report for name, one in each})
    return TrainingData(samples=samples, report=report, place=place, parts=parts, **about)


def _named(name: str, sample: Sample | Prompt) -> Sample | Prompt:
    if isinstance(sample, Prompt):
        return replace(sample, uid=labelled(name, sample.uid), source=name)
    return of_source(name, sample)


def _read_sft(
    config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool, day: datetime.date | None
) -> TrainingData:
    settings = SFTDataSettings(loss_on=config.data.loss_on, **text_settings(config.data, day))
    found = load_sft(list(config.data.path), tokenizer, settings, progress=progress)
    return _of_store(found)


def _read_rl(
    config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool, day: datetime.date | None
) -> TrainingData:
    data, read = config.data, RolloutDataSettings(**text_settings(config.data, day))
    if config.rollout.source is not None:
        if import_reward and config.rollout.reward is not None and model_of(config.rollout.reward) is None:
            load_reward(config.rollout.reward)
        if import_reward:
            load_episode(config.rollout)
        room = config.rollout.max_new_tokens
        prompts = read_prompts(list(data.path), tokenizer, read, max_new_tokens=room)
        return TrainingData(
            samples=prompts.prompts,
            report=prompts.report,
            place=lambda index: prompts.prompts[index].uid,
            notes=prompts.notes,
        )
    rollouts = read_rollouts(list(data.path), tokenizer=tokenizer, settings=read)
    return TrainingData(
        samples=rollouts.samples,
        report=rollouts.report,
        place=lambda index: f"{rollouts.samples[index].source}:{rollouts.lines[index]}",
        notes=rollouts.notes,
        given_ids=True,
    )


def _read_pairs(
    config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool, day: datetime.date | None
) -> TrainingData:
    settings = SFTDataSettings(**text_settings(config.data, day))
    margins = config.loss.command == "reward"
    found = load_pairs(list(config.data.path), tokenizer, settings, progress=progress, margins=margins)
    return _of_store(found)


def _of_store(found: TokenizedDataset) -> TrainingData:
    about = read_metadata(found.folder)
    return TrainingData(
        samples=found,
        report=found.report,
        place=found.place,
        notes=reading_notes(about["files"]),
        given_ids=bool(about.get("given_ids")),
    )


Reader = Callable[..., TrainingData]


def _read_distill(config: Config, tokenizer: Any, **options: Any) -> TrainingData:
    """Text to learn from, or prompts that the student answers."""
    return (_read_sft if config.rollout.source is None else _read_rl)(config, tokenizer, **options)


READERS: dict[str, Reader] = {
    "sft": _read_sft,
    "distill": _read_distill,
    "rl": _read_rl,
    "dpo": _read_pairs,
    "reward": _read_pairs,
}
"""What reads the data of each command: (config, tokenizer, progress=, import_reward=, day=) -> TrainingData."""


def load_held_out(
    config: Config,
    tokenizer: Any,
    *,
    progress: Progress | None = None,
    import_reward: bool = True,
    day: datetime.date | None = None,
) -> TrainingData | None:
    """What `eval.path` holds, read as the run's own data are; None: nothing."""
    settings = config.eval
    if not settings.path:
        return None
    there = config.with_held_out_data()
    try:
        found = load_training_data(there, tokenizer, progress=progress, import_reward=import_reward, day=day)
    except UserError as error:
        raise error.at("eval.path", "data") from error
    found = replace(found, notes=tuple(f"eval.path: {note.removeprefix('data: ')}" for note in found.notes))
    return found if settings.samples is None else replace(found, samples=_first(config, found.samples))


def _first(config: Config, samples: Samples) -> Samples:
    """The first `eval.samples` of them: whole rows, counted as `batch.samples` counts."""
    assert config.eval.samples is not None
    starts, size = row_starts(config, samples), GROUP_SIZES.get(config.loss.command, 1)
    count = starts[min(config.eval.samples // size, len(starts) - 1)]
    return [samples[index] for index in range(int(count))]


def longest_of(samples: Samples) -> int:
    """Tokens of the longest one."""
    if isinstance(samples, StoredSamples):
        return int(samples.lengths.max(initial=0))
    return max((len(sample.tokens) for sample in samples), default=0)


def check_rollouts(config: Config, source: TrainingData) -> str | None:
    """Refuse rollout files that there is nothing to learn from; a line to say if that is so for a part of them."""
    if config.loss.command != "rl" or config.rollout.source is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.paths))


def make_batcher(config: Config, samples: Samples, parts: Sequence[int] = ()) -> Batcher:
    """Global batches of groups: whole groups for RL, whole rows for the others.

    A prompt is a group already: itself, once for each response to it. `parts`: as `TrainingData` has them.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise UserError("data.path", f"{', '.join(data.paths)} has no samples", "give files with at least one")
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    groups, sizes = groups_of(config, samples, parts)
    order["parts"] = epoch_parts(config, sizes)
    if in_rows(config):
        if batch.samples is not None:
            size = GROUP_SIZES[config.loss.command]
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
        assert isinstance(largest[0], Sample), "batch.samples is a multiple of rollout.group"
        raise UserError(
            "batch.samples",
            f"{batch.samples} is less than the {len(largest)} samples of group {largest[0].group!r}",
            f"give {len(largest)} or more",
        )
    # Samples are what is counted here: as many whole groups as there is room for.
    return TokenBudgetBatcher(groups, budget=batch.samples, buffer_size=1, length=len, **order)


def groups_of(config: Config, samples: Samples, parts: Sequence[int] = ()) -> tuple[Sequence[Group], list[int]]:
    """What batches are made of, and how many come from each part of the samples."""
    if in_rows(config):
        starts = row_starts(config, samples)
        return Rows(samples, starts), row_counts(starts, parts)
    ends = np.cumsum(parts or [len(samples)]).tolist()
    by_part = [_groups(config, [samples[i] for i in range(a, b)]) for a, b in pairwise([0, *ends])]
    return [group for groups in by_part for group in groups], [len(groups) for groups in by_part]


def _num_tokens(group: Group) -> int:
    return sum(len(sample) for sample in group)


def _groups(config: Config, samples: Samples) -> list[Group]:
    """Samples of one group together, groups in the order of their first samples."""
    alone: list[Group] = []
    grouped: dict[str | int | None, list[Sample]] = {}
    for sample in samples:
        if isinstance(sample, Prompt):
            alone.append((sample,) * config.rollout.group)
        elif config.loss.advantage in UNGROUPED:
            alone.append((sample,))
        else:
            grouped.setdefault(sample.group, []).append(sample)
    return [*alone, *grouped.values()]
