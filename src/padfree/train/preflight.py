"""Refuse a run that cannot work, before its first step and before anything large is loaded.

    preflight(config)  settings   trackers, process layout, run folder, names of the models and of the reward
                       model      its modules on the meta device, without weights: attention, leakage between samples,
                                  vocabulary, positions
                       data       tokenised: lengths against the caps, token ids, columns that the loss needs
      -> Preflight     tokenizer, data and meta-device model, which the run then uses, and notes: unusual facts that
                       are not errors

A run, its dry run and `padfree plan` all call `preflight`, so that they accept and refuse the same configurations.
`padfree.config` refuses earlier what the settings alone show to be wrong.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.attention import BACKENDS, choose_backend
from padfree.batch import TOKEN_ARRAYS, Sample
from padfree.choices import Init, ModelHead
from padfree.config import Config
from padfree.config.functions import is_path, model_of
from padfree.config.hub import check_names
from padfree.config.inert import inert_settings
from padfree.config.output_sections import check_folder
from padfree.config.reader import LARGEST_COUNT
from padfree.cp.ulysses import check_heads
from padfree.data import StoredSamples
from padfree.data.prepare import Progress
from padfree.data.rewards import BUILT_IN, check_reward_name, load_reward
from padfree.distributed import raise_together
from padfree.errors import UserError
from padfree.estimate.cost_file import read_cost
from padfree.losses import load_objective
from padfree.losses.objectives.custom import USER_OBJECTIVE
from padfree.model import attach, lm_head_of
from padfree.model.model_files import open_model
from padfree.model.scalar_head import scalar_head_of
from padfree.model.structure import skeleton
from padfree.packing.context_sizes import context_sizes
from padfree.packing.fill import Indices
from padfree.record.run_folder import check_not_in_use, check_run_folder
from padfree.record.trackers import require_trackers
from padfree.rollout import Prompt, stop_tokens
from padfree.rollout.engines import check_engine_name
from padfree.rollout.environment import check_episode_rows, check_episode_settings
from padfree.sizes import ModelSizes
from padfree.tasks.reading import Samples, TrainingData
from padfree.train.data_rows import (
    check_shown,
    epoch_order,
    in_rows,
    lengths_of,
    row_counts,
    row_starts,
)
from padfree.train.end_record import check_can_continue
from padfree.train.limits import ModelLimits, check_fits
from padfree.train.resume import check_newest, data_day
from padfree.train.rl.reference_model import check_same_tensors
from padfree.train.setup import check_placement, check_reward_model
from padfree.train.training_data import (
    check_rollouts,
    groups_of,
    load_held_out,
    load_tokenizer,
    load_training_data,
    make_batcher,
    open_tokenizer,
)
from padfree.train.vocabulary import check_vocabularies

MANY_SAMPLES = 1_000_000
"""With more samples than this, batches are not formed merely to count steps."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preflight:
    """The objects that the checks have loaded, and notes to show before the first step."""

    tokenizer: Any
    source: TrainingData
    held_out: TrainingData | None  # the data of eval.path
    model: PreTrainedModel  # on the meta device
    notes: tuple[str, ...]


def preflight(
    config: Config,
    *,
    processes: int,
    device_type: str,
    dry: bool = False,
    planned: bool = False,
    progress: Progress | None = None,
) -> Preflight:
    """Raise a `UserError` if the run cannot work. Collective: if one process refuses, all raise.

    `dry`: do not import user code, and allow a device that this machine does not have. `planned`: for `padfree plan`;
    skip the checks of the run folder and of lengths, because nothing is written and the plan counts samples over the
    cap.
    """
    day = data_day(config)
    if not dist.is_initialized():
        return _run_checks(config, processes, device_type, dry, planned, progress, day)
    days: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(days, day)  # midnight may fall between two ranks' calls
    found, error = None, None
    try:
        found = _run_checks(config, processes, device_type, dry, planned, progress, days[0])
    except UserError as caught:
        error = caught
    raise_together(error)
    assert found is not None
    return found


def check_folder_usable(config: Config) -> None:
    """Refuse a folder that is not writable, is not a run folder, is in use, or has a checkpoint of other settings."""
    check_run_folder(config)
    check_folder(config.run.folder, "run.folder")
    check_not_in_use(Path(config.run.folder))
    check_newest(config)
    check_can_continue(config, raised_steps_only=True)


def _run_checks(
    config: Config,
    processes: int,
    device_type: str,
    dry: bool,
    planned: bool,
    progress: Progress | None,
    day: datetime.date,
) -> Preflight:
    check_settings(config, processes=processes, device_type=device_type)
    if dry and not planned:  # a real run checks this earlier, on one rank: concurrent checks would disturb each other
        check_folder_usable(config)
    if is_path(config.loss.kind) and not dry:
        load_objective(config.loss.kind)
    model, limits = check_models(config)
    check_context(config, model, processes)
    check_attention(config, model, device_type)
    tokenizer = load_tokenizer(config)
    notes = [*inert_settings(config), *check_vocabularies(config, tokenizer)]
    if config.rollout.source is not None:
        stop_tokens(tokenizer, model)
    source = load_training_data(config, tokenizer, progress=progress, import_reward=not dry, day=day)
    check_source(config, source, limits, tokenizer)
    if config.data.sources:
        check_shown(config, groups_of(config, source.samples, source.parts)[1])
    held_out = load_held_out(config, tokenizer, progress=progress, import_reward=not dry, day=day)
    if held_out is not None:
        check_held_out(config, held_out, limits, tokenizer, processes, planned=planned)
    notes += [*source.notes, *(() if held_out is None else held_out.notes), *_notes(config, source, limits, dry)]
    if not planned:
        check_lengths(config, source, processes)
        if (note := check_rollouts(config, source)) is not None:
            notes.append(note)
    return Preflight(tokenizer=tokenizer, source=source, held_out=held_out, model=model, notes=tuple(notes))


# Settings


def check_settings(config: Config, *, processes: int, device_type: str) -> None:
    """Check the settings against this machine, without loading a model or data."""
    require_trackers(config.track)
    context, replicate = config.parallel.context, config.parallel.replicate
    if processes % ((1 if context == "auto" else context) * replicate):
        raise UserError(
            "parallel.context",
            f"{context} times parallel.replicate {replicate} does not divide {processes} processes",
            "change one of them",
        )
    requested = config.model.attention
    if requested != "auto" and requested not in BACKENDS:
        raise UserError("model.attention", "", f"set it to auto, or to one of {', '.join(BACKENDS)}", value=requested)
    check_placement(config, device_type)
    if config.rollout.source is not None:
        for name in {config.rollout.reward, config.eval.reward} - {None}:
            check_reward_name(str(name))
        check_episode_settings(config.rollout)
        check_engine_name(config.rollout.engine)
    if is_path(config.loss.kind):
        USER_OBJECTIVE.check(config.loss.kind)
    if config.batch.cost is not None:
        read_cost(config.batch.cost)
    check_names(config)


# Models


def check_models(config: Config) -> tuple[PreTrainedModel, ModelLimits]:
    """Build the model on the meta device; return it and the limits that all models of the run have in common."""
    model = _checked_model(config, config.model.path, "model.path", config.model.init, config.loss.head)
    limits = ModelLimits.of(model)
    path = config.reference.path
    if path is not None and path != config.model.path:
        reference = _checked_model(config, path, "reference.path", "weights")
        limits = limits.within(ModelLimits.of(reference))
        if config.reference.refresh is not None:
            check_same_tensors(reference, model, config.reference.refresh)
    if config.teacher.path is not None:
        teacher = _checked_model(config, config.teacher.path, "teacher.path", "weights")
        own, other = (len(lm_head_of(one).weight) for one in (model, teacher))
        if own != other:
            raise UserError(
                "teacher.path",
                f"{config.teacher.path} has a vocabulary of {other:,}, model.path one of {own:,}",
                "give a teacher with the same vocabulary",
            )
        limits = limits.within(ModelLimits.of(teacher))
    if config.loss.advantage == "gae":
        own = config.critic.path is None
        setting, init = ("model.path", config.model.init) if own else ("critic.path", "weights")
        critic = _checked_model(config, config.critic.path or config.model.path, setting, init, "scalar")
        limits = limits.within(ModelLimits.of(critic))
    if (reward_path := model_of(config.rollout.reward)) is not None:
        _checked_model(config, reward_path, "rollout.reward", "weights", "scalar")
        if Path(reward_path).exists():
            check_reward_model(
                reward_path, open_model(reward_path, trust_remote_code=config.model.trust_remote_code)[1]
            )
            open_tokenizer(reward_path, "rollout.reward", config.model.trust_remote_code)
    return model, limits


def _checked_model(config: Config, path: str, setting: str, init: Init, head: ModelHead = "tokens") -> PreTrainedModel:
    code = config.model.trust_remote_code
    model = skeleton(path, trust_remote_code=code, setting=setting, head=head)
    try:
        if Path(path).exists():
            # Check which tensors its files hold. For a Hub id this would download all of them.
            init_setting = "model.init" if setting == "model.path" else None
            open_model(path, init=init, init_setting=init_setting, trust_remote_code=code)
        attach(model, config.model.attention)
        (scalar_head_of if head == "scalar" else lm_head_of)(model)
    except UserError as error:
        raise error.at(setting, "model") from None
    return model


def check_attention(config: Config, model: PreTrainedModel, device_type: str) -> None:
    """Refuse an attention backend that cannot run this model on this device, if the device is present."""
    sizes = ModelSizes.of(model.config)
    if sizes.latent or not sizes.query or (device_type == "cuda" and not torch.cuda.is_available()):
        return
    try:
        choose_backend(device_type, getattr(torch, config.model.dtype), sizes.head, requested=config.model.attention)
    except UserError as error:
        raise error.at("model.attention", "backend") from None


def check_context(config: Config, model: PreTrainedModel, processes: int) -> None:
    """Refuse parallel.context=auto if a layer or the context-parallel method does not support it."""
    if config.parallel.context != "auto":
        return
    sizes = ModelSizes.of(model.config)
    if sizes.mixer_layers:
        raise UserError(
            "parallel.context",
            "'auto', but the model has layers that carry a state along the sequence and need whole samples on one rank",
            "set parallel.context=1",
        )
    for width in context_sizes(config.parallel.most_context(processes)):
        if config.parallel.method == "ulysses":
            try:
                check_heads(sizes.heads, sizes.key // sizes.head, width)
            except UserError:
                raise UserError(
                    "parallel.method",
                    f"'ulysses' with parallel.context=auto can use up to {width} context ranks, and {width} does not "
                    f"divide {sizes.heads} attention heads",
                    "set parallel.method=allgather",
                ) from None


# Data


def check_held_out(
    config: Config,
    held_out: TrainingData,
    limits: ModelLimits,
    tokenizer: Any,
    processes: int,
    *,
    planned: bool = False,
) -> None:
    """Check the data of `eval.path` like training data."""
    held_out_config = config.with_held_out_data()
    check_source(held_out_config, held_out, limits, tokenizer, setting="eval.path")
    if not planned:
        check_lengths(held_out_config, held_out, processes, budget=False)


def check_source(
    config: Config, source: TrainingData, limits: ModelLimits, tokenizer: Any, *, setting: str = "data.path"
) -> None:
    """Refuse data that the model cannot process or that lacks what the loss needs."""
    sampled = config.rollout.source is not None
    limit = limits.positions
    shorter = "a lower rollout.max_new_tokens, or " if sampled else ""
    # Text cannot contain ids outside its tokenizer's vocabulary: scan its tokens only if that vocabulary is larger.
    text = isinstance(source.samples, StoredSamples) and not source.given_ids
    looked_at = not text or _largest_id(tokenizer) >= limits.vocabulary
    check_fits(
        source.samples,
        limits,
        place=source.place,
        setting=setting,
        look_at_tokens=looked_at,
        vocabulary_cure="set model.tokenizer to the tokenizer of this model, or give rollouts in its token ids",
        positions_cure=f"set {shorter}data.max_length={limit} and data.overlong=truncate (or drop)",
    )
    if not config.loss.task.in_rows and not sampled:
        _check_columns(config, source)
        untrained = untrained_samples(source)
        if len(untrained) == len(source.samples):
            raise UserError(
                setting,
                f"none of {len(untrained):,} samples has a token to train, the first is {source.place(untrained[0])}",
                "give a response_length of 1 or more, or a loss_mask with a 1 after the first token",
            )
    if sampled:
        _check_rows(config, source)
        check_episode_rows(config.rollout, [one for one in source.samples if isinstance(one, Prompt)])


def untrained_samples(source: TrainingData) -> list[int]:
    """Indices of samples without trained tokens. Text rows without them are refused or dropped when they are read."""
    if isinstance(source.samples, StoredSamples):
        return []
    return [index for index, one in enumerate(source.samples) if isinstance(one, Sample) and not one.num_labels]


def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values(), default=-1)


def check_lengths(config: Config, source: TrainingData, processes: int, *, budget: bool = True) -> None:
    """Refuse samples over the token cap of a device or the token budget of a step, if batch.overlong is "error".

    `budget=False` skips the budget: an evaluation has no steps.
    """
    batch, context = config.batch, config.parallel.most_context(processes)
    if batch.overlong != "error":
        return
    alone = np.arange(len(source.samples) + 1)
    rows = row_starts(config, source.samples)
    pairs = config.loss.task.group_size > 1
    # Both answers of a pair are in one micro-batch; all samples of a data row are in one step.
    _check_cap("batch.max_tokens", batch.max_tokens, context, rows if pairs else alone, source)
    if budget and batch.tokens is not None:
        _check_cap("batch.tokens", batch.tokens, 1, rows, source)


def _check_cap(setting: str, cap: int, context: int, starts: Indices, source: TrainingData) -> None:
    """Refuse a range of samples, from one entry of `starts` to the next, that has more tokens than the cap."""
    lengths = np.diff(np.concatenate([[0], np.cumsum(lengths_of(source.samples))])[starts])
    over = np.flatnonzero(lengths > cap * context)
    if not len(over):
        return
    first, needed = int(over[0]), -(-int(lengths.max()) // context)
    size, sample = int(starts[first + 1] - starts[first]), source.samples[int(starts[first])]
    with_response = " with its response" if isinstance(sample, Prompt) else ""
    if size > 1:
        paired = isinstance(sample, Sample) and sample.reward is not None
        with_response = " in its two answers" if paired else f" in its {size} samples"
    shared = f" on each of {context} context ranks" if context > 1 else ""
    more = f", and {len(over) - 1} more are too long" if len(over) > 1 else ""
    place, limit = source.place(int(starts[first])), cap * context // size
    raise UserError(
        setting,
        f"{cap}{shared}, but {place} has {lengths[first]} tokens{with_response}{more}",
        f"set {setting}={needed}, or batch.overlong=alone, or data.max_length={limit} and data.overlong=truncate",
    )


def _check_columns(config: Config, source: TrainingData) -> None:
    """Check the arrays of given rollouts: required columns are in every row; optional ones in all rows or in none."""
    loss, reference = config.loss, config.reference.path
    needs: dict[str, tuple[str, object, str]] = {}
    if loss.old_policy == "sampler":
        needs["logprobs"] = ("loss.old_policy", "sampler", "loss.old_policy=trainer")
    elif loss.needs_sampler_logprobs():
        needs["logprobs"] = ("loss.corrections", list(loss.corrections), "loss.corrections=[]")
    if loss.kl_coefficient > 0 and reference is None:
        model = shlex.quote(config.model.path)
        needs["ref_logprobs"] = ("loss.kl_coefficient", loss.kl_coefficient, f"reference.path={model}")
    if loss.advantage == "given":
        needs["advantages"] = ("loss.advantage", "given", "loss.advantage=grpo")
    replaced = {"advantages"} if loss.advantage != "given" else set()
    replaced |= {"values", "returns"} if loss.advantage == "gae" else set()
    replaced |= {"ref_logprobs"} if reference is not None else set()
    for field in TOKEN_ARRAYS:
        missing = [index for index, sample in enumerate(source.samples) if getattr(sample, field) is None]
        if field in needs and missing:
            setting, value, cure = needs[field]
            raise UserError(
                setting,
                f", but {source.place(missing[0])} has no {field!r}",
                f"set {cure}, or give that column in every row",
                value,
            )
        if field not in replaced and 0 < len(missing) < len(source.samples):
            raise UserError(
                "data.path",
                f"{source.place(missing[0])} has no {field!r}, but other rows have it",
                "give that column in every row, or in none",
            )


def _check_rows(config: Config, source: TrainingData) -> None:
    """Call a built-in reward for every row. It raises an error for a row that it cannot compute a reward for."""
    name = config.rollout.reward
    if name not in BUILT_IN:
        return
    reward = load_reward(name)
    for prompt in source.samples:
        assert isinstance(prompt, Prompt)
        reward("", prompt.row, prompt.uid)


# Notes: unusual facts that are not errors


def _notes(config: Config, source: TrainingData, limits: ModelLimits, dry: bool) -> Iterator[str]:
    if config.optimizer.changes_nothing:
        yield f"optimizer.lr is 0: {'only the critic is trained' if config.critic.lr else 'no weight changes'}"
    if untrained := untrained_samples(source):
        count = f"{len(untrained):,} of {len(source.samples):,}"
        yield f"data.path: {count} samples have no token to train, the first is {source.place(untrained[0])}"
    longest, trained = int(lengths_of(source.samples).max(initial=0)), limits.trained_positions
    if trained is not None and longest > trained:
        yield f"samples have up to {longest} tokens, but the model supports {trained} (max_position_embeddings)"
    steps = config.run.steps
    if steps is not None and config.data.epochs is not None:
        steps_in_data = count_steps(config, source, enough=steps)
        if steps_in_data < steps:
            end = "" if config.schedule.kind == "constant" else f", before the {config.schedule.kind} schedule ends"
            yield (
                f"run.steps is {steps}, but the data ends after about {steps_in_data} steps{end}; set "
                f"run.steps={steps_in_data}, or data.epochs=none"
            )
    own_function = config.rollout.reward is not None and model_of(config.rollout.reward) is None
    if dry and own_function and config.rollout.reward not in BUILT_IN:
        yield f"rollout.reward {config.rollout.reward} is not imported by a dry run, so it has not been checked"
    if dry and config.rollout.environment is not None:
        name = config.rollout.environment
        yield f"rollout.environment {name} is not imported by a dry run, so it has not been checked"
    if dry and is_path(config.loss.kind):
        yield f"loss.kind {config.loss.kind} is not imported by a dry run, so it has not been checked"


def count_steps(config: Config, source: TrainingData, *, enough: int) -> int:
    """The number of optimizer steps in all epochs of the data.

    With a token budget, it assumes that all epochs are like the first. If the tokens alone show that there are at least
    `enough` steps, it returns `enough` without counting.
    """
    samples, epochs = source.samples, config.data.epochs
    assert epochs is not None
    if in_rows(config) and config.batch.samples is not None:
        order = epoch_order(config, row_counts(row_starts(config, samples), source.parts))
        rows = config.batch.samples // config.loss.task.group_size
        same_every_epoch = all((part.weight * part.size).denominator == 1 for part in order.parts)
        looked_at = range(1 if same_every_epoch else epochs)
        steps = sum(-(-(order.start(epoch + 1) - order.start(epoch)) // rows) for epoch in looked_at)
        return steps * epochs if same_every_epoch else steps
    if (
        not source.parts
        and config.batch.tokens is not None
        and int(lengths_of(samples).sum()) * epochs >= config.batch.tokens * enough
    ):
        return enough  # no step exceeds its token budget
    once = replace(config, data=replace(config.data, epochs=1), batch=replace(config.batch, overlong="alone"))
    counted: Any = _Lengths(config, samples) if in_rows(config) else samples
    updates = 0
    for groups in make_batcher(once, counted, source.parts):
        in_batch = sum(len(group) for group in groups)
        updates += config.loss.epochs * min(config.loss.mini_batches, in_batch)
    return updates * epochs


def planned_steps(config: Config, source: TrainingData) -> int | None:
    """Approximate number of optimizer steps of the run. If counting would take long: `run.steps`, which may be None."""
    steps, quick = config.run.steps, config.batch.samples is not None and config.rollout.source is None
    if config.data.epochs is None or (not quick and len(source.samples) > MANY_SAMPLES):
        return steps
    steps_in_data = count_steps(config, source, enough=steps or LARGEST_COUNT)
    return steps_in_data if steps is None else min(steps, steps_in_data)


class _Lengths(Sequence[Any]):
    """Stands in for the samples if only their lengths are needed, so that no tokens are read."""

    def __init__(self, config: Config, samples: Samples) -> None:
        self._lengths, self.row_starts = lengths_of(samples), row_starts(config, samples)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: Any) -> Any:
        return range(int(self._lengths[index]))
