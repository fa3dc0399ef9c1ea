"""The settings of a run: one frozen dataclass per section, read from TOML and from `section.name=value`.

    recipe.toml                      command line              what a run is given
    [model]                          optimizer.lr=1e-5         Config(model=ModelConfig(path="Qwen/Qwen3-0.6B", ...),
    path = "Qwen/Qwen3-0.6B"                                          optimizer=OptimizerConfig(lr=1e-05, ...), ...)

The last word wins: defaults, then the file, then the overrides in their order. An override's value is TOML (`0.1`,
`true`, `["token_tis"]`), or a string where it is no TOML. A name that does not exist, a value of another type and a
setting that is missing are each one line that names the setting and the cure.

This package imports neither torch nor any other part of padfree but the settings of the parts, so that a recipe can be
checked where torch does not work.
"""

from padfree.config.config import Config
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
from padfree.optim.optimizer_settings import OptimizerConfig, ScheduleConfig

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
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
    "TrackConfig",
    "config_from_dict",
    "load_config",
]
