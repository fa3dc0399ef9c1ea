"""Refuse a run that cannot work, before anything large is loaded. The function `preflight` checks:

    settings    trackers, process layout, run folder, names of the models and of the reward
    model       attention, leakage between samples, vocabulary, positions (the model has no weights yet)
    data        lengths, token ids, columns that the loss needs

A run, its dry run (`--dry`) and `padfree plan` all call `preflight`, so they refuse the same configurations.
`padfree.config` finds the errors that the settings alone show.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.attention import BACKENDS
from padfree.config import Config
from padfree.config.functions import is_path
from padfree.config.hub import check_names, named_models
from padfree.config.inert import inert_settings
from padfree.config.output_sections import check_folder
from padfree.data.prepare import Progress
from padfree.data.rewards import check_reward_name
from padfree.distributed import raise_together
from padfree.distributed.mesh import check_expert_ranks
from padfree.errors import UserError
from padfree.estimate.cost_file import read_cost
from padfree.losses import load_objective
from padfree.losses.objectives.custom import USER_OBJECTIVE
from padfree.model.export_files import check_savable
from padfree.record.run_folder import check_not_in_use, check_run_folder
from padfree.record.trackers import require_trackers
from padfree.rollout import stop_tokens
from padfree.rollout.engines import check_engine_name
from padfree.rollout.environment import check_episode_settings
from padfree.tasks.reading import TrainingData
from padfree.train.batcher import check_shown, groups_of
from padfree.train.check_data import ModelLimits, check_lengths, check_source
from padfree.train.check_models import check_attention, check_context, check_experts, check_models
from padfree.train.evaluate import check_best
from padfree.train.finished import check_can_continue, check_newest, data_day
from padfree.train.run_notes import run_notes
from padfree.train.setup import check_placement
from padfree.train.training_data import (
    check_rollouts,
    load_held_out,
    load_tokenizer,
    load_training_data,
)
from padfree.train.vocabulary import check_vocabularies


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Preflight:
    """The tokenizer, the data and the model (without weights) that the checks before a run have loaded for the run.

    `notes`: texts to show the user before the first step.
    """

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
    trains: bool = True,
    progress: Progress | None = None,
) -> Preflight:
    """Check the run. Raise a `UserError` on all processes if the run cannot work. Collective.

    `dry`: do not import user code, and accept a missing GPU. `planned`: do not check the run folder and sample lengths.
    `trains`: False for `padfree eval`.
    """
    day = data_day(config)
    if not dist.is_initialized():
        return _run_checks(config, processes, device_type, dry, planned, trains, progress, day)
    days: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(days, day)  # all ranks must use the same date, also if they start around midnight
    found, error = None, None
    try:
        found = _run_checks(config, processes, device_type, dry, planned, trains, progress, days[0])
    except UserError as caught:
        error = caught
    raise_together(error)
    assert found is not None
    return found


def check_folder_usable(config: Config) -> None:
    """Raise a `UserError` if the run folder cannot be used.

    The folder cannot be used if it is not writable, contains files of something else than a run, belongs to another
    running process, or holds a checkpoint that this run cannot resume.
    """
    check_run_folder(config)
    check_folder(config.run.folder, "run.folder")
    check_not_in_use(Path(config.run.folder))
    check_newest(config)
    check_can_continue(config.run, config.checkpoint, raised_steps_only=True)


def _run_checks(
    config: Config,
    processes: int,
    device_type: str,
    dry: bool,
    planned: bool,
    trains: bool,
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
    check_experts(config, model, processes)
    check_attention(config, model, device_type)
    tokenizer = load_tokenizer(config)
    if trains and config.checkpoint.export:
        own = "model.path" if config.model.tokenizer is None else "model.tokenizer"
        check_savable(model, tokenizer, model_setting="model.path", tokenizer_setting=own)
    notes = [*inert_settings(config), *check_vocabularies(config.model, named_models(config), tokenizer)]
    if config.rollout.source is not None:
        stop_tokens(tokenizer, model)
    source = load_training_data(config, tokenizer, progress=progress, import_reward=not dry, day=day)
    _check_source(config, source, limits, tokenizer)
    if config.data.sources:
        check_shown(config.data, groups_of(config, source.samples, source.parts)[1])
    held_out = load_held_out(config, tokenizer, progress=progress, import_reward=not dry, day=day)
    if held_out is not None:
        held_out_config = config.with_held_out_data()
        _check_source(held_out_config, held_out, limits, tokenizer, "eval.path")
        check_best(config.checkpoint.best, held_out)
        if not planned:
            _check_lengths(held_out_config, held_out, processes, budget=False)
    notes += [*source.notes, *(() if held_out is None else held_out.notes), *run_notes(config, source, limits, dry)]
    if not planned:
        _check_lengths(config, source, processes)
        if (note := check_rollouts(config, source)) is not None:
            notes.append(note)
    return Preflight(tokenizer=tokenizer, source=source, held_out=held_out, model=model, notes=tuple(notes))


# Settings


def check_settings(config: Config, *, processes: int, device_type: str) -> None:
    """Raise a `UserError` for settings that do not suit the machine or the number of processes.

    Settings that name a package, module or file that does not exist are refused, too. No model and no data are loaded.
    """
    require_trackers(config.track)
    context, replicate = config.parallel.context, config.parallel.replicate
    if processes % ((1 if context == "auto" else context) * replicate):
        raise UserError(
            "parallel.context",
            f"{context} × {replicate} (parallel.context × parallel.replicate) does not divide the {processes} "
            "processes",
            "lower one of the two settings, or start a number of processes that is a multiple of their product",
        )
    check_expert_ranks(config.parallel.expert, processes // replicate)
    requested = config.model.attention
    if requested != "auto" and requested not in BACKENDS:
        raise UserError(
            "model.attention",
            "is not an attention backend",
            f"set it to auto, or to one of {', '.join(BACKENDS)}",
            value=requested,
        )
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


# Data


def _check_source(
    config: Config, source: TrainingData, limits: ModelLimits, tokenizer: Any, setting: str = "data.path"
) -> None:
    check_source(
        source,
        limits,
        tokenizer,
        model=config.model,
        reference=config.reference,
        loss=config.loss,
        rollout=config.rollout,
        setting=setting,
    )


def _check_lengths(config: Config, source: TrainingData, processes: int, *, budget: bool = True) -> None:
    check_lengths(
        source,
        batch=config.batch,
        loss=config.loss,
        rollout=config.rollout,
        context=config.parallel.most_context(processes),
        budget=budget,
    )
