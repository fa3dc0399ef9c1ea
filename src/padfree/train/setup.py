"""Build the models of a run from its settings.

Config -> build_engine      the model with its optimizer, its loss and its scorer (which computes log-probabilities)
       -> build_reference   the reference model of the KL term
       -> build_critic      the value model that is trained together with the policy
       -> export            write the trained model, or its adapters, to a folder
       -> export_critic     write the value model to a folder
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from padfree.choices import Init, ModelHead, PackOverlong
from padfree.config import Config
from padfree.config.checkpointing import uses_host
from padfree.config.functions import model_of
from padfree.config.hub import GIVEN_TEXT
from padfree.data import RolloutDataSettings
from padfree.data.chat_renderer import chat_renderer
from padfree.distributed import Mesh
from padfree.errors import UserError
from padfree.estimate.cost_file import read_cost
from padfree.layers.float8 import check_float8_device
from padfree.model.export import export_adapters, export_model
from padfree.model.load import load_model, opened_together
from padfree.model.model_files import base_dtype
from padfree.model.scalar_head import WEIGHT, pad_token_of, use_pad_token
from padfree.optim.optimizer import make_optimizer
from padfree.rollout.engines.in_process.row_trial import PACK_MULTIPLE, SHORTEST_PACK
from padfree.sharding.parallelize import parallelize, transformations
from padfree.tasks import task_of
from padfree.train.critic import Critic, ValueMicroBatchLoss
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import PackSettings
from padfree.train.resolve_auto import resolve_auto_on
from padfree.train.rl.reference_model import AdapterReference, ModelReference, ReferenceModel
from padfree.train.rl.reward_model import ModelReward
from padfree.train.scorer import ScalarScorer, Scorer
from padfree.train.training_data import open_tokenizer
from padfree.train.vocabulary import unique_name


def check_placement(config: Config, device_type: str) -> None:
    """Raise a `UserError` for offloading on a CPU device, and for exporting adapters without stored base weights."""
    if config.parallel.offload and device_type == "cpu":
        raise UserError("parallel.offload", "true, but the device is already the CPU", "set parallel.offload=false")
    if uses_host(config.parallel.checkpointing) and device_type == "cpu":
        raise UserError(
            "parallel.checkpointing",
            f"{config.parallel.checkpointing!r} offloads activations to the CPU, but the device is already the CPU",
            "set parallel.checkpointing=selective",
        )
    path = Path(config.model.path)
    if _exports_adapters(config) and (config.model.init == "random" or path.is_file()):
        raise UserError(
            "lora.export",
            f"'adapter', but {path} has no stored weights that the adapters could be applied to",
            "set lora.export=merged",
        )


def build_engine(config: Config, mesh: Mesh, tokenizer: Any = None) -> Engine:
    """Load and parallelize the model, and build everything that a step needs.

    For a reward model, the tokenizer determines the padding token in the model's config.
    """
    check_placement(config, mesh.device.type)
    if config.parallel.linear == "float8":
        check_float8_device(mesh.device)
    config = resolve_auto_on(config, mesh).config
    model = _load(
        config,
        mesh,
        config.model.path,
        offload=config.parallel.offload,
        checkpointing=config.parallel.checkpointing,
        reshard=config.parallel.reshard,
        lora=config.lora,
        float8=config.parallel.float8,
        freeze=config.model.freeze,
        init=config.model.init,
        head=config.loss.head,
        replay=config.rollout.routing == "replay",
    )
    if config.loss.head == "scalar":
        use_pad_token(model, tokenizer)
    optimizer = make_optimizer(model, config.optimizer)
    groups_are_rows = config.loss.task.turns and config.rollout.source is None
    mixed = len(config.data.sources) > 1
    settings = LossSettings(
        loss=config.loss.settings(),
        aggregation=config.loss.aggregation,
        constant=config.loss.constant,
        groups_are_rows=groups_are_rows,
        sources=tuple(source.label for source in config.data.sources) if groups_are_rows and mixed else (),
        max_grad_norm=config.optimizer.max_grad_norm,
        head_memory=config.parallel.head_bytes,
        load_balancing=config.loss.load_balancing,
        router_bias=config.loss.router_bias,
        skip_zero_gradient=config.loss.skip_zero_gradient == "auto",
    )
    micro_batch_loss = task_of(config.loss.command).loss(
        settings.loss,
        temperature=config.loss.temperature,
        memory=config.parallel.head_bytes,
        teacher=build_teacher(config, mesh) if config.loss.task.has_teacher else None,
    )
    scorer = _scorer(config, mesh, model, config.loss.head, routes=config.rollout.routing == "replay")
    return Engine(scorer, optimizer, settings, micro_batch_loss)


def build_critic(config: Config, mesh: Mesh) -> Critic | None:
    """Build the critic, a value model that is trained with the policy; None if `loss.advantage` is not "gae"."""
    if config.loss.advantage != "gae":
        return None
    config = resolve_auto_on(config, mesh).config
    model = _load(
        config,
        mesh,
        config.critic.path or config.model.path,
        "critic.path",
        offload=config.parallel.offload,
        checkpointing=config.parallel.checkpointing,
        stretch=True,
        reshard=config.parallel.reshard,
        init=config.model.init if config.critic.path is None else "weights",
        head="scalar",
        spread=0.0,  # a new head predicts 0 everywhere
    )
    optimizer = make_optimizer(model, config.optimizer.without_groups().with_lr(config.critic.lr))
    settings = LossSettings(
        loss=config.critic.value_settings(),
        aggregation=config.loss.aggregation,
        constant=config.loss.constant,
        max_grad_norm=config.critic.max_grad_norm,
    )
    scorer = _scorer(config, mesh, model, "scalar", "critic.path")
    engine = Engine(scorer, optimizer, settings, ValueMicroBatchLoss(config.critic.value_settings()))
    return Critic(engine, config.critic)


def build_reward_model(config: Config, mesh: Mesh) -> ModelReward | None:
    """Load the reward model that `rollout.reward` names, frozen and sharded like the policy.

    Return None if `rollout.reward` does not name a model.
    """
    path, code = model_of(config.rollout.reward), config.model.trust_remote_code
    if path is None:
        return None
    config = resolve_auto_on(config, mesh).config
    with _errors_at("rollout.reward"):
        check_reward_model("rollout.reward", path, opened_together(path, trust_remote_code=code)[1])
    model = _load(config, mesh, path, "rollout.reward", offload=False, frozen=True, head="scalar")
    # The reward model's tokenizer may need more tokens for a text than the run's. Therefore a text may exceed
    # batch.max_tokens; it then gets a pack of its own.
    scorer = _scorer(config, mesh, model, "scalar", "rollout.reward", overlong="alone")
    assert isinstance(scorer, ScalarScorer)
    return ModelReward(scorer, open_tokenizer(path, "rollout.reward", code), config.data)


def check_evaluated_head(config: Config) -> None:
    """Raise a `UserError` if `padfree eval` would measure a new, random scalar head. All ranks must call this."""
    path, init, code = config.model.path, config.model.init, config.model.trust_remote_code
    if config.loss.head == "scalar" and init == "weights" and not Path(path).is_file():
        with _errors_at("model.path"):
            check_reward_model("model.path", path, opened_together(path, trust_remote_code=code)[1])


def check_reward_model(setting: str, path: str, files: Mapping[str, Path] | None) -> None:
    """Raise an error about `setting` if the model at `path` has no trained scalar head.

    `files`: its files, if they are known.
    """
    if files is None or WEIGHT not in files:
        raise UserError(setting, f"{path} has no {WEIGHT}", "give the folder of a model that `padfree reward` wrote")


def build_teacher(config: Config, mesh: Mesh) -> PreTrainedModel:
    """Load the teacher of a distillation, frozen and sharded like the student.

    With `teacher.offload`, its weights stay on the CPU.
    """
    assert config.teacher.path is not None
    offload = config.teacher.offload and mesh.device.type != "cpu"
    return _load(config, mesh, config.teacher.path, "teacher.path", offload=offload, frozen=True)


def build_teacher_scorer(config: Config, mesh: Mesh) -> Scorer | None:
    """Return the scorer that computes the teacher's log-probabilities; None if `loss.advantage` is not "teacher"."""
    if config.loss.advantage != "teacher":
        return None
    config = resolve_auto_on(config, mesh).config
    return _scorer(config, mesh, build_teacher(config, mesh), setting="teacher.path")


def build_reference(config: Config, mesh: Mesh, engine: Engine | None = None) -> ReferenceModel | None:
    """Return the reference model of the KL term; None if `reference.path` is not set.

    Without `engine` (the policy's engine), the reference is always a separate model, and its weights are not compared
    with the policy's weights.
    """
    path, every = config.reference.path, config.reference.refresh
    if path is None:
        return None
    config = resolve_auto_on(config, mesh).config
    if engine is not None and config.lora.rank and unique_name(path) == unique_name(config.model.path):
        return AdapterReference(engine.scorer, every)
    offload = config.reference.offload and mesh.device.type != "cpu"
    model = _load(config, mesh, path, "reference.path", offload=offload, frozen=True)
    reference = ModelReference(_scorer(config, mesh, model, setting="reference.path"), every)
    if engine is not None and every is not None:
        reference.check(engine.model)
    return reference


def export(
    config: Config, model: PreTrainedModel, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype | None = None
) -> Path:
    """Write the trained model, or its adapters if `lora.export` says so, to `folder`. All ranks must call this.

    `dtype`: the dtype of the written weights.
    """
    if tokenizer is not None and config.rollout.source is None:  # a run on given answers
        _add_trained_stops(config, model, tokenizer)
    if _exports_adapters(config):
        return export_adapters(model, folder, tokenizer, base=unique_name(config.model.path))
    return export_model(model, folder, tokenizer, dtype=dtype)


def _add_trained_stops(config: Config, model: PreTrainedModel, tokenizer: Any) -> None:
    """Add the tokens at which the model has learned to stop to its generation config.

    For example, the responses of a base model whose config names <|endoftext|> would otherwise not stop at <|im_end|>,
    with which the chat template ends turns.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return
    chat = chat_renderer(tokenizer, RolloutDataSettings(prompt_format=config.data.prompt_format))
    end = None if chat is None else chat.turn_end
    trained = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(end) if end else None]
    named = generation.eos_token_id
    stops = [] if named is None else [named] if isinstance(named, int) else list(named)
    missing = [stop for stop in dict.fromkeys(trained) if stop is not None and stop not in stops]
    if missing:
        generation.update(eos_token_id=[*stops, *missing])


def export_critic(critic: Critic, folder: Path, tokenizer: Any = None, *, dtype: torch.dtype | None = None) -> Path:
    """Write the critic as a reward model, which `AutoModelForSequenceClassification` loads. All ranks must call this.

    The score of a text is the value at its last token: the expected reward of a response that begins with this text.
    """
    use_pad_token(critic.engine.model, tokenizer)
    return export_model(critic.engine.model, folder, tokenizer, dtype=dtype)


def export_dtype(config: Config, path: str | None = None) -> torch.dtype:
    """Return the dtype in which a model loaded from `path` (None: `model.path`) is exported.

    All ranks must call this.
    """
    if config.checkpoint.export_dtype != "base":
        chosen: torch.dtype = getattr(torch, config.checkpoint.export_dtype)
        return chosen
    code, init = config.model.trust_remote_code, config.model.init if path is None else "weights"
    return base_dtype(*opened_together(path or config.model.path, init=init, trust_remote_code=code))


def _exports_adapters(config: Config) -> bool:
    return config.lora.rank > 0 and config.lora.export == "adapter"


def _load(
    config: Config,
    mesh: Mesh,
    path: str,
    setting: str = "model.path",
    *,
    offload: bool,
    init: Init = "weights",
    head: ModelHead = "tokens",
    spread: float | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Load the model at `path` and parallelize it.

    `setting`: the name of the setting that holds `path`, for error messages. `changes`: further arguments of
    `transformations`, such as `lora`.
    """
    steps = transformations(
        mesh,
        attention=config.model.attention,
        compile=str(config.parallel.compile),
        operators=config.parallel.kernels == "auto",
        exact=config.rollout.exact is True,
        dtype=getattr(torch, config.model.dtype),
        offload=offload,
        **changes,
    )
    with nullcontext() if setting == "model.path" else _errors_at(setting):
        return load_model(
            path,
            device=mesh.device,
            shard=lambda model: parallelize(model, steps),
            offload=offload,
            init=init,
            seed=config.run.seed,
            trust_remote_code=config.model.trust_remote_code,
            head=head,
            spread=spread,
            vision=None if setting in GIVEN_TEXT else config.model.vision,
        )


@contextmanager
def _errors_at(setting: str) -> Iterator[None]:
    """Context manager: turn each `UserError` of its block into one about `setting`, which holds the model's path."""
    try:
        yield
    except UserError as error:
        raise error.at(setting, "model") from None


def _scorer(
    config: Config,
    mesh: Mesh,
    model: PreTrainedModel,
    head: ModelHead = "tokens",
    setting: str = "model.path",
    overlong: PackOverlong | None = None,
    routes: bool = False,
) -> Scorer:
    ends = config.loss.head == "scalar"
    return (ScalarScorer if head == "scalar" else Scorer)(
        model,
        mesh,
        max_tokens=config.batch.max_tokens,
        pack_settings=PackSettings(
            layout=config.parallel.layout,
            method=config.parallel.method,
            share_prefixes=config.batch.share_prefixes,
            ends=ends,
            routes=routes,
            pad_token=pad_token_of(model) if ends else None,
            min_tokens=SHORTEST_PACK if config.rollout.exact is True else 0,
            multiple=PACK_MULTIPLE if config.rollout.exact is True and mesh.device.type == "cpu" else 1,
        ),
        temperature=config.loss.temperature,
        overlong=overlong or config.batch.overlong,
        cost=None if config.batch.cost is None else read_cost(config.batch.cost),
        setting=setting,
    )
