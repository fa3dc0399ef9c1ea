"""Read data files, and turn their rows into samples.

`load_sft` and `load_pairs` load text, and `read_rollouts` loads rollout files. The main modules:

    sources          read rows from files, folders and the Hub
    fields           find the columns of prompt, response and so on
    chat_renderer    render conversations with the chat template
    tokenize         turn rows into tokens and loss masks
    store            write tokens to disk
    dataset          read samples from disk

Names are imported on first use, so that a process that only computes rewards does not import torch.
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
