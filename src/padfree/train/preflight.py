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

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from padfree.attention import BACKENDS, choose_backend
from padfree.choices import Init, ModelHead
from padfree.config import Config
from padfree.config.checkpointing import needs_compiled_layers
from padfree.config.functions import is_path, model_of
from padfree.config.hub import GIVEN_TEXT, check_names, named_models
from padfree.config.inert import inert_settings
from padfree.config.output_sections import check_folder
from padfree.cp.ulysses import check_heads
from padfree.data.prepare import Progress
from padfree.data.rewards import check_reward_name
from padfree.distributed import raise_together
from padfree.distributed.mesh import check_expert_ranks
from padfree.errors import UserError
from padfree.estimate.cost_file import read_cost
from padfree.losses import load_objective
from padfree.losses.objectives.custom import USER_OBJECTIVE
from padfree.model import attach, lm_head_of
from padfree.model.lora import adapts_experts
from padfree.model.model_files import open_model
from padfree.model.route_replay import need_replay
from padfree.model.scalar_head import scalar_head_of
from padfree.model.stacked_experts import undivided
from padfree.model.structure import skeleton
from padfree.packing.context_sizes import context_sizes
from padfree.record.run_folder import check_not_in_use, check_run_folder
from padfree.record.trackers import require_trackers
from padfree.rollout import stop_tokens
from padfree.rollout.engines import check_engine_name
from padfree.rollout.engines.in_process.sampler import check_samples_images
from padfree.rollout.engines.servers.start import check_image_inputs
from padfree.rollout.engines.vllm import VllmServer
from padfree.rollout.environment import check_episode_settings
from padfree.sizes import ModelSizes
from padfree.tasks.reading import TrainingData
from padfree.train.batcher import check_shown, groups_of
from padfree.train.check_data import ModelLimits, check_lengths, check_source
from padfree.train.finished import check_can_continue, check_newest, data_day
from padfree.train.rl.reference_model import check_same_tensors
from padfree.train.run_notes import run_notes
from padfree.train.setup import check_placement, check_reward_model
from padfree.train.training_data import (
    check_rollouts,
    load_held_out,
    load_tokenizer,
    load_training_data,
    open_tokenizer,
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
    progress: Progress | None = None,
) -> Preflight:
    """Check the run. Raise a `UserError` on all processes if the run cannot work. Collective.

    `dry`: do not import user code, and accept a missing GPU. `planned`: do not check the run folder and sample lengths.
    """
    day = data_day(config)
    if not dist.is_initialized():
        return _run_checks(config, processes, device_type, dry, planned, progress, day)
    days: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(days, day)  # all ranks must use the same date, also if they start around midnight
    found, error = None, None
    try:
        found = _run_checks(config, processes, device_type, dry, planned, progress, days[0])
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


# Models


def check_models(config: Config) -> tuple[PreTrainedModel, ModelLimits]:
    """Return the trained model, built without weights, and the strictest input limits of all models of the run."""
    model = _checked_model(config, config.model.path, "model.path", config.model.init, config.loss.head)
    limits = ModelLimits.of(model)
    if config.model.vision and config.rollout.source is not None:
        check_samples_images(model)
        if config.rollout.engine == "vllm":
            check_image_inputs(VllmServer, config, model)
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
                f"{config.teacher.path} has a vocabulary of {other:,} tokens, but that of model.path has {own:,}",
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
    vision = None if setting in GIVEN_TEXT else config.model.vision
    model = skeleton(path, trust_remote_code=code, setting=setting, head=head, vision=vision)
    try:
        if Path(path).exists():
            # Check which tensors the model's files hold. The files of a Hub id are not on this machine yet.
            init_setting = "model.init" if setting == "model.path" else None
            open_model(path, init=init, init_setting=init_setting, trust_remote_code=code)
        attach(model, config.model.attention)
        (scalar_head_of if head == "scalar" else lm_head_of)(model)
    except UserError as error:
        raise error.at(setting, "model") from None
    return model


def check_attention(config: Config, model: PreTrainedModel, device_type: str) -> None:
    """Raise a `UserError` if the attention backend cannot run this model on the device.

    The check is skipped if the device is a GPU that this machine does not have.
    """
    sizes = ModelSizes.of(model.config)
    if sizes.latent or not sizes.query or (device_type == "cuda" and not torch.cuda.is_available()):
        return
    try:
        choose_backend(device_type, getattr(torch, config.model.dtype), sizes.head, requested=config.model.attention)
    except UserError as error:
        raise error.at("model.attention", "backend") from None


def check_context(config: Config, model: PreTrainedModel, processes: int) -> None:
    """Raise a `UserError` for `parallel.context=auto` if context ranks cannot divide a sample of this model."""
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


def check_replay(config: Config, model: PreTrainedModel) -> None:
    """Raise a `UserError` for `rollout.routing=replay` if the trained model cannot replay recorded expert choices."""
    if config.parallel.checkpointing == "host":
        raise UserError(
            "rollout.routing",
            ", but parallel.checkpointing=host needs one graph per compiled layer, and replayed routers break graphs",
            "set parallel.checkpointing=selective",
            "replay",
        )
    need_replay(model)


def check_experts(config: Config, model: PreTrainedModel, processes: int) -> None:
    """Raise a `UserError` if the model does not support `rollout.routing=replay` or `parallel.expert` above 1."""
    if config.rollout.routing == "replay":
        check_replay(config, model)
    expert = config.parallel.expert
    if expert == 1:
        return
    check_expert_ranks(expert, processes // config.parallel.replicate)
    if needs_compiled_layers(config.parallel.checkpointing):
        raise UserError(
            "parallel.expert",
            f"{expert}, but parallel.checkpointing={config.parallel.checkpointing} needs one graph per compiled layer, "
            "and the exchange of tokens between ranks breaks the graph",
            "set parallel.checkpointing=selective",
        )
    if config.lora.rank and adapts_experts(model, config.lora.targets):
        raise UserError(
            "parallel.expert",
            f"{expert}, but experts with LoRA adapters cannot be divided over ranks",
            "set parallel.expert=1, or leave the experts out of lora.targets",
        )
    reason = undivided(model, expert, processes // config.parallel.replicate // expert)
    if reason is not None:
        raise UserError("parallel.expert", f"{expert}, but {reason}", "set parallel.expert=1, or another number")


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
