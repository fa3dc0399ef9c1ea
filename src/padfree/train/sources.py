"""What a run is trained on: the tokenizer, the samples, and the global batches they come in.

Config -> load_tokenizer
       -> load_source       samples (SFT), rollouts (RL), or prompts that rollouts are still to be written to
       -> make_batcher      global batches of groups, the same on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from padfree.batch import Sample
from padfree.config import Config
from padfree.data import (
    DataReport,
    RolloutDataSettings,
    SFTDataSettings,
    TokenizedDataset,
    load_reward,
    load_sft,
    read_rollouts,
)
from padfree.data.prepare import Progress
from padfree.packing import FixedSizeBatcher, TokenBudgetBatcher
from padfree.rollout import Prompt, read_prompts
from padfree.train.credit import check_signal

Samples = Sequence[Sample | Prompt] | TokenizedDataset
Group = Sequence[Sample | Prompt]
Batcher = TokenBudgetBatcher[Group] | FixedSizeBatcher[Group]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """What a run is trained on."""

    samples: Samples
    report: DataReport


UNGROUPED = ("reinforce++", "given")
"""Advantages that do not compare samples of a group."""


def load_tokenizer(config: Config) -> Any:
    """The tokenizer that `model.tokenizer` names, or the model's own; None for rollout files where the model has none.

    Those may be token ids. Where they are text after all, `read_rollouts` says that it needs one.
    """
    path = Path(config.model.tokenizer or config.model.path)
    if path.exists() and not (path.is_dir() and any(path.glob("tokenizer*"))):
        given = config.loss.kind != "sft" and config.rollout.reward is None
        if given and config.model.tokenizer is None:
            return None
        raise ValueError(f"model.tokenizer: {path} holds none; give a folder or Hub id that does")
    name = config.model.tokenizer or config.model.path
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=config.model.trust_remote_code)
    except OSError as error:
        reason = str(error).splitlines()[0]
        field = "model.path" if config.model.tokenizer is None else "model.tokenizer"
        raise ValueError(f"{field}: {name!r} has no tokenizer to load ({reason}); give a folder or a Hub id") from error


def load_source(config: Config, tokenizer: Any, *, progress: Progress | None = None) -> Source:
    """The samples, or the prompts, of `data.path`, and what became of its rows. `progress` is of the tokenising."""
    data = config.data
    chosen: dict[str, Any] = {
        name: getattr(data, name)
        for name in ("columns", "prompt_format", "append_eos", "max_length", "overlong", "on_bad_row")
    }
    if config.loss.kind == "sft":
        settings = SFTDataSettings(loss_on=data.loss_on, **chosen)
        found = load_sft(list(data.path), tokenizer, settings, progress=progress or False)
        return Source(samples=found, report=found.report)
    if config.rollout.reward is not None:
        return _load_prompts(config, tokenizer, RolloutDataSettings(**chosen))
    rollouts = read_rollouts(list(data.path), tokenizer=tokenizer, settings=RolloutDataSettings(**chosen))
    return Source(samples=rollouts.samples, report=rollouts.report)


def check_rollouts(config: Config, source: Source) -> str | None:
    """Refuse rollout files that there is nothing to learn from; a line to say if that is so for a part of them."""
    if config.loss.kind == "sft" or config.rollout.reward is not None:
        return None
    samples = [sample for sample in source.samples if isinstance(sample, Sample)]
    return check_signal(samples, config.loss.advantage, ", ".join(config.data.path))


def _load_prompts(config: Config, tokenizer: Any, settings: RolloutDataSettings) -> Source:
    """Prompts, where settings are such that their responses can be trained on."""
    assert config.rollout.reward is not None
    load_reward(config.rollout.reward)  # refused here rather than after the model is loaded
    advantage, group = config.loss.advantage, config.rollout.group
    if advantage == "given":
        raise ValueError("loss.advantage: 'given', but rollouts written here bring none; choose grpo or another")
    if group == 1 and advantage not in UNGROUPED:
        raise ValueError(
            f"rollout.group: 1 with loss.advantage {advantage!r} makes every advantage 0; give 2 or more responses to "
            "compare, or choose reinforce++"
        )
    found = read_prompts(list(config.data.path), tokenizer, settings, max_new_tokens=config.rollout.max_new_tokens)
    longest = max(found.prompts, key=len)
    needed = -(-len(longest) // config.parallel.context)
    if needed > config.batch.max_tokens and config.batch.overlong == "error":
        raise ValueError(
            f"batch.max_tokens: {config.batch.max_tokens} is less than the {needed} that prompt {longest.uid} "
            f"({len(longest.tokens)} tokens) and a response of {longest.room} can need; give {needed} or more, lower "
            "rollout.max_new_tokens, or set data.max_length and data.overlong"
        )
    return Source(samples=found.prompts, report=found.report)


def make_batcher(config: Config, samples: Samples) -> Batcher:
    """Global batches of groups: of whole groups for RL, and of groups of one sample for SFT.

    A prompt is a group already: itself, once for each response to it.
    """
    data, batch = config.data, config.batch
    if not len(samples):
        raise ValueError(f"data.path: {', '.join(data.path)} has no samples; give files with at least one")
    order: dict[str, Any] = {"shuffle": data.shuffle, "seed": config.run.seed, "epochs": data.epochs}
    if config.loss.kind == "sft":
        source = _Singles(samples)
        if batch.samples is not None:
            return FixedSizeBatcher(source, batch_size=batch.samples, length=_num_tokens, **order)
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


class _Singles:
    """Samples as groups of one, made when they are asked for."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Group:
        return (self._samples[index],)

    def __iter__(self) -> Any:
        return ((sample,) for sample in self._samples)


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
