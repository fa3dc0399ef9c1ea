"""From the settings of a run to its loss and its models.

Config -> loss_settings     what padfree.losses understands
       -> build_engine      model, optimizer, and what scores with them
       -> build_reference   the model that the KL term compares with
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from padfree.config import Config, LossConfig
from padfree.dist import Mesh
from padfree.losses import (
    CISPOSettings,
    ClipSettings,
    Correction,
    GSPOSettings,
    IcePopSettings,
    Objective,
    OPSMSettings,
    PolicySettings,
    ReinforceSettings,
    SequenceMaskSettings,
    SequenceTISSettings,
    SFTSettings,
    TokenLossSettings,
    TokenTISSettings,
)
from padfree.model.load import load_model
from padfree.train.engine import Engine, LossSettings
from padfree.train.microbatch import RowSettings
from padfree.train.optimizer import make_optimizer
from padfree.train.parallelize import parallelize, transformations
from padfree.train.scorer import Scorer

OBJECTIVES: dict[str, type[Any]] = {
    "clip": ClipSettings,
    "gspo": GSPOSettings,
    "cispo": CISPOSettings,
    "reinforce": ReinforceSettings,
}
CORRECTIONS: dict[str, type[Any]] = {
    "token_tis": TokenTISSettings,
    "sequence_tis": SequenceTISSettings,
    "icepop": IcePopSettings,
    "sequence_mask": SequenceMaskSettings,
    "opsm": OPSMSettings,
}


def loss_settings(config: LossConfig) -> TokenLossSettings:
    """The loss as `padfree.losses` wants it told."""
    if config.kind == "sft":
        return SFTSettings()
    bounds = {name: value for name in ("low", "high", "dual") if (value := getattr(config, name)) is not None}
    objective: Objective = OBJECTIVES[config.kind](**bounds)
    corrections: tuple[Correction, ...] = tuple(
        CORRECTIONS[name](**{key: value for key, value in asdict(getattr(config, name)).items() if value is not None})
        for name in config.corrections
    )
    return PolicySettings(
        objective=objective,
        old_policy=config.old_policy,
        corrections=corrections,
        kl_coefficient=config.kl_coefficient,
        kl_estimator=config.kl_estimator,
        entropy_coefficient=config.entropy_coefficient,
    )


def build_engine(config: Config, mesh: Mesh) -> Engine:
    """The model with its weights, parallelized, and everything a step needs."""
    model = _load(config, mesh, config.model.path, checkpointing=config.parallel.checkpointing)
    optimizer = make_optimizer(
        model,
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    settings = LossSettings(
        loss=loss_settings(config.loss),
        weights=config.loss.weights,
        constant=config.loss.constant,
        max_grad_norm=config.optimizer.max_grad_norm,
    )
    return Engine(_scorer(config, mesh, model), optimizer, settings)


def build_reference(config: Config, mesh: Mesh) -> Scorer | None:
    """The model that the KL term compares with, if the settings name one."""
    if config.reference.path is None:
        return None
    model = _load(config, mesh, config.reference.path, checkpointing="none")
    return _scorer(config, mesh, model.requires_grad_(False))


def _load(config: Config, mesh: Mesh, path: str, **changes: Any) -> PreTrainedModel:
    steps = transformations(
        mesh,
        attention=config.model.attention,
        compile=config.parallel.compile,
        dtype=getattr(torch, config.model.dtype),
        **changes,
    )
    return load_model(
        path,
        device=mesh.device,
        shard=lambda model: parallelize(model, steps),
        seed=config.run.seed,
        trust_remote_code=config.model.trust_remote_code,
    )


def _scorer(config: Config, mesh: Mesh, model: PreTrainedModel) -> Scorer:
    return Scorer(
        model,
        mesh,
        max_tokens=config.batch.max_tokens,
        rows=RowSettings(layout=config.parallel.layout, method=config.parallel.method),
        temperature=config.loss.temperature,
        overlong=config.batch.overlong,
    )
