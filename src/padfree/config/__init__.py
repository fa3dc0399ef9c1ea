"""The settings of a run: one frozen dataclass per section, read from TOML and from `section.name=value`.

    recipe.toml                      command line              result: the `Config` of the run
    [model]                          optimizer.lr=1e-5         Config(model=ModelConfig(path="Qwen/Qwen3-0.6B", ...),
    path = "Qwen/Qwen3-0.6B"                                          optimizer=OptimizerConfig(lr=1e-05, ...), ...)

Later values win: defaults, then the file, then the overrides in their order. The value of an override is TOML (`0.1`,
`true`, `["token_tis"]`); a value that is not TOML is a string. An unknown name, a value of the wrong type and a missing
setting are refused with an error message that names the setting and the fix.

This package does not import torch. From other parts of padfree it imports only their settings. A recipe can therefore
be checked without torch.
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
