"""Data: text and rollouts to samples.

records     one row: parsing, checking a field, what is said of a bad one
data_settings  plain data: what can be chosen
fields      which columns hold which fields
sources     JSON Lines, JSON, Parquet, folders, the Hub
chat_renderer  conversations as text, and what the assistant wrote of it
encode      text to tokens and masks
store       tokens on disk, keyed by all they depend on
dataset     TokenizedDataset: the samples of a store; MixedDataset: those of several sources
prepare     load_sft: all of the above
rollouts    read_rollouts: rollout files to samples
rewards     built-in rewards and the user's own

Every name is loaded when it is first used: a process that judges needs no torch, and starts in a tenth of the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from padfree.lazy import load_when_used

if TYPE_CHECKING:
    from padfree.data.data_settings import RolloutDataSettings, SFTDataSettings
    from padfree.data.dataset import MixedDataset, PairDataset, StoredSamples, TokenizedDataset, of_source
    from padfree.data.prepare import Progress, load_pairs, load_sft
    from padfree.data.records import DataReport, SkippedRow, labelled
    from padfree.data.rewards import (
        Reward,
        RewardFunction,
        check_reward_name,
        exact_match,
        load_reward,
        number_after_hashes,
    )
    from padfree.data.rollouts import RolloutData, read_rollouts
    from padfree.data.store import default_cache_folder

_NAMES = {
    "dataset": ("MixedDataset", "PairDataset", "StoredSamples", "TokenizedDataset", "of_source"),
    "prepare": ("Progress", "load_pairs", "load_sft"),
    "records": ("DataReport", "SkippedRow", "labelled"),
    "rewards": (
        "Reward",
        "RewardFunction",
        "check_reward_name",
        "exact_match",
        "load_reward",
        "number_after_hashes",
    ),
    "rollouts": ("RolloutData", "read_rollouts"),
    "data_settings": ("RolloutDataSettings", "SFTDataSettings"),
    "store": ("default_cache_folder",),
}
_LAZY = {name: f"padfree.data.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "DataReport",
    "MixedDataset",
    "PairDataset",
    "Progress",
    "Reward",
    "RewardFunction",
    "RolloutData",
    "RolloutDataSettings",
    "SFTDataSettings",
    "SkippedRow",
    "StoredSamples",
    "TokenizedDataset",
    "check_reward_name",
    "default_cache_folder",
    "exact_match",
    "labelled",
    "load_pairs",
    "load_reward",
    "load_sft",
    "number_after_hashes",
    "of_source",
    "read_rollouts",
]

__getattr__, __dir__ = load_when_used(__name__, _LAZY, parts=tuple(_NAMES))
