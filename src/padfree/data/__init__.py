"""Read data files, and turn text and rollouts into samples.

records        one row: parsing, checking fields, errors about bad rows
data_settings  the settings that decide how rows become tokens
fields         which columns hold which fields
formats        the formats of data files, and the usual names of their columns
sources        reads rows from JSON Lines, JSON, Parquet, folders and the Hub
conversation   reads messages in several formats into one format
rows           reads a row as a conversation or as a plain prompt
chat_renderer  renders conversations as text, and finds the characters that the assistant wrote
encode         turns text into tokens and loss masks
tokenize       turns chunks of rows into tokens and loss masks
image_*        images of rows: references in rows, files, the model's processor, images in the token cache
row_images     puts the images of a row into the messages of its conversation
store          tokens on disk, in folders named by a hash of everything that the tokens depend on
dataset        TokenizedDataset: the samples of a store; MixedDataset: the samples of several sources
prepare        load_sft and load_pairs: turn files into data sets, with all of the above
rollouts       read_rollouts: reads rollout files into samples
rewards        built-in and user-defined reward functions

Names are imported on first use, so that a process that only computes rewards does not import torch. Such a process
starts ten times faster.
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
