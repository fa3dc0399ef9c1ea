"""Settings that were given but have no effect in this run.

    loss.kind = "sft"              loss.clip.low has no effect with loss.kind=sft
    rollout.engine = "in_process"  rollout.canary has no effect with rollout.engine=in_process

`READ_BY` has an entry for every setting or table. The entry is None if every run reads the setting. Otherwise it is a
function of the `Config` that returns why this run does not read the setting, or None if it does. Only settings that the
user has given are reported.
"""

from __future__ import annotations

from collections.abc import Callable

from padfree.config.config import Config
from padfree.config.functions import model_of
from padfree.config.inputs import has_splits, is_hub_id
from padfree.config.loss import CORRECTIONS, OBJECTIVES, TASK_TABLES
from padfree.config.loss_settings import TaskSettings

Reason = Callable[[Config], str | None]
"""Returns why a run does not read a setting, such as "with lora.rank=0", or None if it does."""


def _unless(read: Callable[[Config], bool], reason: Callable[[Config], str]) -> Reason:
    return lambda config: None if read(config) else reason(config)


def _kind(*kinds: str) -> Reason:
    return _unless(lambda config: config.loss.kind in kinds, lambda config: f"with loss.kind={config.loss.kind}")


def _task(read: Callable[[type[TaskSettings]], bool]) -> Reason:
    return _unless(lambda config: read(config.loss.task), lambda config: f"in padfree {config.loss.command}")


_policy = _task(lambda task: task.command == "rl")


def _correction(name: str) -> Reason:
    return _unless(
        lambda config: name in config.loss.corrections, lambda config: f"without {name!r} in loss.corrections"
    )


def _first(*reasons: Reason) -> Reason:
    """Combine several rules into one, which returns the first reason that any of them gives.

    A rule returns the reason why a run does not read a setting, or None if the run reads it.
    """
    return lambda config: next((found for reason in reasons if (found := reason(config)) is not None), None)


_sampled = _unless(
    lambda config: config.rollout.source is not None,
    lambda config: "without rollout.reward, rollout.environment or rollout.agent",
)
_served = _unless(
    lambda config: config.rollout.has_servers, lambda config: f"with rollout.engine={config.rollout.engine}"
)
_colocated = _unless(lambda config: config.rollout.colocated, lambda _: "with rollout.colocated=false")
_adapters = _unless(lambda config: config.lora.rank > 0, lambda config: "with lora.rank=0")
_evaluated = _unless(lambda config: bool(config.eval.path), lambda config: "without eval.path")
_kl = _unless(lambda config: config.loss.kl_coefficient > 0, lambda config: "with loss.kl_coefficient=0")
_falls = _unless(lambda config: config.schedule.kind != "constant", lambda _: "with schedule.kind=constant")
_compiled = _unless(lambda config: config.parallel.compile != "none", lambda _: "with parallel.compile=none")
_context = _unless(lambda config: config.parallel.context != 1, lambda config: "with parallel.context=1")


_conversations = _first(
    _task(lambda task: task.turns),
    _unless(lambda config: config.rollout.source is None, lambda _: "in a run that samples responses"),
)


def _names_any(kind: Callable[[str], bool], setting: str, what: str) -> Reason:
    """Return a rule for a setting that is read if a path in `setting` is of this kind."""
    paths: dict[str, Callable[[Config], tuple[str, ...]]] = {
        "data.path": lambda config: config.data.paths,
        "eval.path": lambda config: config.eval.path,
    }
    return _unless(lambda config: any(map(kind, paths[setting](config))), lambda _: f"because {setting} names {what}")


_NO_SPLITS = "neither a Hub id nor a folder of DatasetDict.save_to_disk"


READ_BY: dict[str, Reason | None] = {
    "model.path": None,
    "model.init": None,
    "model.tokenizer": None,
    "model.dtype": None,
    "model.freeze": None,
    "model.attention": None,
    "model.trust_remote_code": None,
    "model.vision": None,
    "lora.rank": None,
    "lora.alpha": _adapters,
    "lora.dropout": _adapters,
    "lora.targets": _adapters,
    "lora.export": _adapters,
    "reference.path": None,
    "reference.offload": _unless(lambda config: config.reference.path is not None, lambda _: "without reference.path"),
    "reference.refresh": None,
    "reference.precompute": None,
    "teacher.path": None,
    "teacher.offload": _unless(lambda config: config.teacher.path is not None, lambda _: "without teacher.path"),
    "critic": _unless(
        lambda config: config.loss.advantage == "gae", lambda config: f"with loss.advantage={config.loss.advantage}"
    ),
    "rollout.reward": None,
    "rollout.environment": None,
    "rollout.agent": None,
    "rollout.episode_timeout": _first(
        _sampled,
        _unless(
            lambda config: config.rollout.has_episodes or model_of(config.rollout.reward) is None,
            lambda _: "with a reward model and without an environment",
        ),
    ),
    "rollout.on_failure": _sampled,
    "rollout.reward_processes": _sampled,
    "rollout.samples_per_prompt": _sampled,
    "rollout.max_new_tokens": _sampled,
    "rollout.engine": _sampled,
    "rollout.routing": _policy,
    "rollout.max_concurrent": _sampled,
    "rollout.kv_cache_memory": _first(
        _sampled,
        _unless(
            lambda config: config.rollout.engine == "in_process",
            lambda config: f"with rollout.engine={config.rollout.engine}",
        ),
    ),
    "rollout.exact": _sampled,
    "rollout.staleness": _sampled,
    "rollout.on_update": _first(
        _sampled, _served, _unless(lambda config: config.rollout.staleness > 0, lambda _: "with rollout.staleness=0")
    ),
    "rollout.filter": _sampled,
    "rollout.oversample": _first(
        _sampled, _unless(lambda config: config.rollout.filter != "none", lambda _: "with rollout.filter=none")
    ),
    "rollout.filter_bound": _first(
        _sampled, _unless(lambda config: config.rollout.filter != "none", lambda _: "with rollout.filter=none")
    ),
    "rollout.overlong_buffer": _sampled,
    "rollout.overlong_penalty": _first(
        _sampled, _unless(lambda config: config.rollout.overlong_buffer > 0, lambda _: "with rollout.overlong_buffer=0")
    ),
    "rollout.servers": _first(_sampled, _served),
    "rollout.launch.command": _first(_sampled, _served),
    "rollout.launch": _first(
        _sampled,
        _served,
        _unless(lambda config: bool(config.rollout.launch.command), lambda _: "without rollout.launch.command"),
    ),
    "rollout.colocated": _first(_sampled, _served),
    "rollout.server_memory": _first(_sampled, _served, _colocated),
    "rollout.sleeping_memory": _first(_sampled, _served, _colocated),
    "rollout.transfer": _first(_sampled, _served),
    "rollout.weight_sync": _first(_sampled, _served),
    "rollout.transfer_folder": _first(
        _sampled,
        _served,
        _unless(
            lambda config: config.rollout.resolved_transfer == "files",
            lambda config: f"with rollout.transfer={config.rollout.transfer}",
        ),
    ),
    "rollout.timeout": _first(_sampled, _served),
    "rollout.canary": _first(_sampled, _served),
    "rollout.top_p": _sampled,
    "rollout.top_k": _sampled,
    "rollout.min_p": _sampled,
    "rollout.min_new_tokens": _sampled,
    "data.path": None,
    "data.subset": _names_any(is_hub_id, "data.path", "no Hub id"),
    "data.split": _names_any(has_splits, "data.path", _NO_SPLITS),
    "data.columns": None,
    "data.sources": None,
    "data.loss_on": _conversations,
    "data.turns": _first(
        _conversations, _unless(lambda config: config.data.loss_on != "all", lambda _: "with data.loss_on=all")
    ),
    "data.system": None,
    "data.prompt_template": None,
    "data.prompt_format": None,
    "data.chat_template": _unless(
        lambda config: config.data.prompt_format != "plain" or config.rollout.has_episodes,
        lambda _: "with data.prompt_format=plain",
    ),
    "data.append_eos": _unless(
        lambda config: config.rollout.source is None or model_of(config.rollout.reward) is not None,
        lambda _: "in a run that samples responses",
    ),
    "data.max_length": None,
    "data.overlong": _unless(lambda config: config.data.max_length is not None, lambda _: "without data.max_length"),
    "data.on_bad_row": None,
    "data.image_folder": None,
    "data.max_image_pixels": None,
    "data.shuffle": None,
    "data.epochs": None,
    "batch.samples": None,
    "batch.tokens": None,
    "batch.max_tokens": None,
    "batch.overlong": None,
    "batch.buffer": _unless(lambda config: config.batch.tokens is not None, lambda _: "without batch.tokens"),
    "batch.cost": None,
    "batch.share_prefixes": None,
    "loss.kind": None,
    "loss.aggregation": _task(lambda task: task.weighs_tokens),
    "loss.constant": None,
    "loss.temperature": None,
    "loss.load_balancing": None,
    "loss.router_bias": None,
    "loss.advantage": _policy,
    "loss.low": None,
    "loss.high": None,
    "loss.dual": None,
    **{f"loss.{name}": _kind(name) for name in (*OBJECTIVES, *TASK_TABLES)},
    "loss.distill.beta": _first(
        _kind("distill"),
        _unless(
            lambda config: config.loss.distill.divergence == "jsd",
            lambda config: f"with loss.distill.divergence={config.loss.distill.divergence}",
        ),
    ),
    "loss.dpo.label_smoothing": _first(
        _kind("dpo"),
        _unless(
            lambda config: config.loss.dpo.variant in ("sigmoid", "simpo"),
            lambda config: f"with loss.dpo.variant={config.loss.dpo.variant}",
        ),
    ),
    "loss.dpo.gamma": _first(
        _kind("dpo"),
        _unless(
            lambda config: config.loss.dpo.variant == "simpo",
            lambda config: f"with loss.dpo.variant={config.loss.dpo.variant}",
        ),
    ),
    "loss.old_policy": _policy,
    "loss.corrections": _policy,
    **{f"loss.{name}": _correction(name) for name in CORRECTIONS},
    "loss.kl_coefficient": _policy,
    "loss.kl_estimator": _first(_policy, _kl),
    "loss.kl_weighting": _first(_policy, _kl),
    "loss.entropy_coefficient": _policy,
    "loss.epochs": _policy,
    "loss.mini_batches": _policy,
    "loss.skip_zero_gradient": _policy,
    "optimizer.name": None,
    "optimizer.muon": _unless(
        lambda config: config.optimizer.name == "muon", lambda config: f"with optimizer.name={config.optimizer.name}"
    ),
    "optimizer.lr": None,
    "optimizer.betas": None,
    "optimizer.eps": None,
    "optimizer.state": None,
    "optimizer.weight_decay": None,
    "optimizer.max_grad_norm": None,
    "optimizer.groups": None,
    "schedule.kind": None,
    "schedule.warmup": None,
    "schedule.final": _unless(
        lambda config: config.schedule.kind != "constant", lambda _: "with schedule.kind=constant"
    ),
    "parallel.context": None,
    "parallel.replicate": None,
    "parallel.expert": None,
    "parallel.layout": _context,
    "parallel.method": _context,
    "parallel.checkpointing": None,
    "parallel.compile": None,
    "parallel.kernels": _unless(
        lambda config: config.parallel.compile != "none", lambda _: "with parallel.compile=none"
    ),
    "parallel.linear": None,
    "parallel.float8_products": None,  # refused without parallel.linear=float8
    "parallel.float8_budget": None,
    "parallel.head_memory": _task(lambda task: task.head == "tokens"),
    "parallel.reshard": None,
    "parallel.offload": None,
    "checkpoint.every": None,
    "checkpoint.keep": None,
    "checkpoint.asynchronous": None,
    "checkpoint.resume": None,
    "checkpoint.export": None,
    "checkpoint.export_dtype": _unless(
        lambda config: config.checkpoint.export, lambda _: "with checkpoint.export=false"
    ),
    "checkpoint.best": None,
    "checkpoint.better": None,
    "track.tensorboard": None,
    "track.wandb": None,
    "track.trackio": None,
    "track.mlflow": None,
    "eval.path": None,
    "eval.split": _first(_evaluated, _names_any(has_splits, "eval.path", _NO_SPLITS)),
    "eval": _evaluated,
    "run.folder": None,
    "run.steps": None,
    "run.seed": None,
    "run.device": None,
    "run.timeout": None,
    "run.deterministic": None,
    "slurm.nodes": None,
    "slurm.processes": None,
    "slurm.restarts": None,
    "slurm.sbatch": None,
    "slurm.setup": None,
    "slurm.python": None,
}
"""For each setting, a function that returns why a run does not read it, or None if every run reads the setting.

The entry of a table, such as "loss.clip", applies to all settings of this table that have no entry.
"""


def rule_of(name: str) -> Reason | None:
    """Return a function that says why a run does not read the setting `name`, or None if every run reads the setting.

    If `READ_BY` has no entry for the setting, e.g. "loss.clip.low", the entry for its table "loss.clip" is returned.
    """
    while name not in READ_BY:
        name, _, last = name.rpartition(".")
        if not last or not name:
            raise KeyError(name)
    return READ_BY[name]


def inert_settings(config: Config) -> list[str]:
    """Return a sentence for each setting that the user gave but that this run does not use, for example:

    "loss.clip.low has no effect with loss.kind=sft"
    """
    found: dict[str, list[str]] = {}
    for name in sorted(config.given):
        rule = rule_of(name)
        reason = None if rule is None else rule(config)
        if reason is not None:
            found.setdefault(reason, []).append(name)
    return [
        f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect {why}" for why, names in found.items()
    ]
