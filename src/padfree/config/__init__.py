"""The settings of a run: one frozen dataclass per section, read from TOML and from `section.name=value`.

    recipe.toml                      command line              result: the `Config` of the run
    [model]                          optimizer.lr=1e-5         Config(model=ModelConfig(path="Qwen/Qwen3-0.6B", ...),
    path = "Qwen/Qwen3-0.6B"                                          optimizer=OptimizerConfig(lr=1e-05, ...), ...)

Values are taken from the defaults, then the file, then the overrides; later ones win. An override is TOML (`0.1`,
`true`, `["token_tis"]`) or else a string. Wrong names, types and missing settings give an error that names the setting
and the fix.

This package does not import torch, so a recipe can be checked without it.
"""

from padfree.config.config import Config, EvaluationConfig
from padfree.config.loss import LossConfig
from padfree.config.model_sections import CriticConfig, LoraConfig, ModelConfig, ReferenceConfig
from padfree.config.reader import config_from_dict, load_config
from padfree.config.rollout import LaunchConfig, RolloutConfig
from padfree.config.sections import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    ParallelConfig,
    RunConfig,
    TrackConfig,
)
from padfree.config.slurm_section import SlurmConfig
from padfree.optim.optimizer_settings import OptimizerConfig, ScheduleConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "EvaluationConfig",
    "LaunchConfig",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReferenceConfig",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "SlurmConfig",
    "TrackConfig",
    "config_from_dict",
    "load_config",
]
