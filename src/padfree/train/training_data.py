"""What a run is trained on: the tokenizer, the samples, and the global batches they come in.

Config -> load_tokenizer
       -> load_training_data       samples (SFT), rollouts (RL), or prompts that rollouts are still to be written to
       -> make_batcher      global batches of groups, the same on every rank
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from padfree.batch import Sample
from padfree.config import Config, DataConfig
from padfree.config.functions import model_of
from padfree.config.hub import check_name
from padfree.config.inputs import check_regular
from padfree.config.rules import shown_error
from padfree.data import (
    DataReport,
    RolloutDataSettings,
    SFTDataSettings,
    TokenizedDataset,
    load_pairs,
    load_reward,
    load_sft,
    read_rollouts,
)
from padfree.data.prepare import Progress
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.rollout import Prompt, read_prompts
from padfree.rollout.environment import load_episode
from padfree.train.rl.advantages import check_signal

Samples = Sequence[Sample | Prompt] | TokenizedDataset
Group = Sequence[Sample | Prompt]
Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingData:
    """What a run is trained on."""

    samples: Samples
    report: DataReport
    place: Callable[[int], str]  # the file and line of a sample


UNGROUPED = ("reinforce++", "gae", "teacher", "given")
"""Advantages that do not compare samples of a group."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer that `model.tokenizer` names, or the model's own; None for rollout files where the model has none.

    Those may be token ids. Where they are text after all, `read_rollouts` says that it needs one.
    """
    path = Path(config.model.tokenizer or config.model.path)
    if path.exists() and not (path.is_dir() and any(path.glob("tokenizer*"))):
        given = config.loss.command == "rl" and config.rollout.source is None
        if given and config.model.tokenizer is None:
            return None
        raise ValueError(f"model.tokenizer: {path} holds none; give a folder or Hub id that does")
    field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    return open_tokenizer(config.model.tokenizer or config.model.path, field, config.model.trust_remote_code)


def open_tokenizer(name: str, setting: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or a Hub id; what is wrong with its files is one line that begins with `setting`."""
    check_name(name, setting)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # its files may hold anything, and whatever reads them raises in its own way
        raise ValueError(
            f"{setting}: the tokenizer of {name} cannot be read ({shown_error(error)}); give another"
        ) from error


def text_settings(data: DataConfig) -> dict[str, Any]:
    """What `padfree.data` is told of how rows become tokens, a chat template's file read."""
    names = ("columns", "prompt_format", "append_eos", "split", "subset", "max_length", "overlong", "on_bad_row")
    chosen: dict[str, Any] = {name: getattr(data, name) for name in names}
    if data.chat_template is not None:
        chosen["chat_template"] = _read_template(data.chat_template)
    return chosen


def _read_template(name: str) -> str:
    check_regular(Path(name).expanduser(), "data.chat_template")
    try:
        text = Path(name).expanduser().read_text(encoding="utf-8")
        reason = None if text.strip() else "it is empty"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
    if reason is not None:
        raise ValueError(f"data.chat_template: {name} cannot be used ({reason}); give a file with a template")
    return text


def load_training_data(
    config: Config, tokenizer: Any, *, progress: Progress | None = None, import_reward: bool = True
) -> TrainingData:
    """The samples, or the prompts, of `data.path`, and what became of its rows. `progress` is of the tokenising.

    With prompts the reward is imported first, unless that is not wanted: it is refused here rather than later.
    """
    read = READERS[config.loss.command]
    return read(config, tokenizer, progress=progress or False, import_reward=import_reward)


def _read_sft(config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool) -> TrainingData:
    settings = SFTDataSettings(loss_on=config.data.loss_on, **text_settings(config.data))
    found = load_sft(list(config.data.path), tokenizer, settings, progress=progress)
    return TrainingData(samples=found, report=found.report, place=found.place)


def _read_rl(config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool) -> TrainingData:
    data, read = config.data, RolloutDataSettings(**text_settings(config.data))
    if config.rollout.source is not None:
        if import_reward and config.rollout.reward is not None and model_of(config.rollout.reward) is None:
            load_reward(config.rollout.reward)
        if import_reward:
            load_episode(config.rollout)
        room = config.rollout.max_new_tokens
        prompts = read_prompts(list(data.path), tokenizer, read, max_new_tokens=room)
        return TrainingData(
            samples=prompts.prompts, report=prompts.report, place=lambda index: prompts.prompts[index].uid
        )
    rollouts = read_rollouts(list(data.path), tokenizer=tokenizer, settings=read)
    return TrainingData(
        samples=rollouts.samples,
        report=rollouts.report,
        place=lambda index: f"{rollouts.samples[index].source}:{rollouts.lines[index]}",
    )


def _read_pairs(config: Config, tokenizer: Any, *, progress: bool | Progress, import_reward: bool) -> TrainingData:
    settings = SFTDataSettings(**text_settings(config.data))
    margins = config.loss.command == "reward"
    found = load_pairs(list(config.data.path), tokenizer, settings, progress=progress, margins=margins)
    return TrainingData(samples=found, report=found.report, place=found.place)


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
"""What reads the data of each command: (config, tokenizer, progress=, import_reward=) -> TrainingData."""


def load_held_out(
    config: Config, tokenizer: Any, *, progress: Progress | None = None, import_reward: bool = True
) -> TrainingData | None:
    """What `eval.path` holds, read as the run's own data are; None: nothing."""
    settings = config.eval
    if not settings.path:
        return None
    there = held_out_config(config)
    try:
        found = load_training_data(there, tokenizer, progress=progress, import_reward=import_reward)
    except ValueError as error:
        raise ValueError(_of_held_out(error)) from error
    return found if settings.samples is None else replace(found, samples=_first(found.samples, settings.samples))


def _of_held_out(error: ValueError) -> str:
    """A message about `data`, as one about held-out data."""
    return f"eval.path: {str(error).removeprefix('data: ')}"


def held_out_config(config: Config) -> Config:
    """The settings of the run with held-out data in the place of its own."""
    data = replace(config.data, path=config.eval.path, split=config.eval.split)
    reward = config.eval.reward or config.rollout.reward
    return replace(config, data=data, rollout=replace(config.rollout, reward=reward))


def _first(samples: Samples, count: int) -> Samples:
    return [samples[index] for index in range(min(count, len(samples)))]


def longest_of(samples: Samples) -> int:
    """Tokens of the longest one."""
    if isinstance(samples, TokenizedDataset):
        return int(samples.lengths.max(initial=0))
    return max((len(sample.tokens) for sample in samples), default=0)


def check_rollouts(config: Config, source: TrainingData) -> str | None:
    """Refuse rollout files that there is nothing to learn from; a line to say if that is so for a part of them."""
    if config.loss.command != "rl" or config.rollout.source is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.path))


def make_batcher(config: Config, samples: Samples) -> Batcher:
    """Global batches of groups: of whole groups for RL, of groups of as many samples as belong together for the others.

    A prompt is a group already: itself, once for each response to it.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise ValueError(f"data.path: {', '.join(data.path)} has no samples; give files with at least one")
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    if config.loss.command != "rl" and config.rollout.source is None:
        size = GROUP_SIZES[config.loss.command]
        source = _Neighbours(samples, size)
        if batch.samples is not None:
            return FixedSizeBatcher(source, batch_size=batch.samples // size, length=_num_tokens, **order)
        assert batch.tokens is not None
        return TokenBudgetBatcher(
            source,
            budget=batch.tokens,
            buffer_size=batch.buffer,
            overlong=batch.overlong,
            length=_num_tokens,
            **order,
        )
    assert batch.samples is not None
    groups = _groups(config, samples)
    largest = max(groups, key=len)
    if len(largest) > batch.samples:
        assert isinstance(largest[0], Sample), "batch.samples is a multiple of rollout.group"
        raise ValueError(
            f"batch.samples: {batch.samples} is less than the {len(largest)} samples of group {largest[0].group!r}; "
            f"give {len(largest)} or more"
        )
    # Samples are what is counted here: as many whole groups as there is room for.
    return TokenBudgetBatcher(groups, budget=batch.samples, buffer_size=1, length=len, **order)


GROUP_SIZES = {"sft": 1, "dpo": 2, "reward": 2, "distill": 1}
"""How many neighbouring samples of the data are one group, by command."""


class _Neighbours:
    """Samples in groups of `size` neighbours, made when they are asked for."""

    def __init__(self, samples: Samples, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return len(self._samples) // self._size

    def __getitem__(self, index: int) -> Group:
        if index >= len(self):
            raise IndexError(index)
        first = index * self._size
        return tuple(self._samples[first + member] for member in range(self._size))

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))


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
