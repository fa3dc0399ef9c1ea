"""The checks of preflight that need the structure of the models, which are built without weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from padfree.attention import choose_backend
from padfree.choices import Init, ModelHead
from padfree.config import Config
from padfree.config.checkpointing import needs_compiled_layers
from padfree.config.functions import model_of
from padfree.config.hub import GIVEN_TEXT
from padfree.cp.ulysses import check_heads
from padfree.distributed.mesh import check_expert_ranks
from padfree.errors import UserError
from padfree.model import attach, lm_head_of
from padfree.model.load import loaded_generation_config
from padfree.model.lora import adapts_experts
from padfree.model.model_files import open_model
from padfree.model.route_replay import need_replay
from padfree.model.scalar_head import scalar_head_of
from padfree.model.stacked_experts import undivided
from padfree.model.structure import skeleton
from padfree.packing.context_sizes import context_sizes
from padfree.rollout.engines.in_process.sampler import check_samples_images
from padfree.rollout.engines.servers.start import check_image_inputs
from padfree.rollout.engines.vllm import VllmServer
from padfree.sizes import ModelSizes
from padfree.train.check_data import ModelLimits
from padfree.train.rl.reference_model import check_same_tensors
from padfree.train.router_balance import check_router_balance
from padfree.train.setup import check_reward_model
from padfree.train.training_data import open_tokenizer


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
            files = open_model(reward_path, trust_remote_code=config.model.trust_remote_code)[1]
            check_reward_model("rollout.reward", reward_path, files)
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
            _, files = open_model(path, init=init, init_setting=init_setting, trust_remote_code=code)
            if head == "tokens":
                loaded_generation_config(files)
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
    """Raise a `UserError` if the model does not support the settings of its experts and routers: `rollout.routing`,
    `loss.load_balancing`, `loss.router_bias` or `parallel.expert`.
    """
    if config.loss.load_balancing or config.loss.router_bias:
        check_router_balance(model, coefficient=config.loss.load_balancing, bias_rate=config.loss.router_bias)
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
