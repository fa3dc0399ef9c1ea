"""Checkpoints of a training run. A checkpoint is never partly written, and any number of processes can load it.

checkpointer       Checkpointer: collective save and load
background         whether a checkpoint is written in the background
manifest           the contents of a checkpoint, and checks that it fits the model
optimizer_state    optimizer state by parameter name
checkpoint_files   write, sync, hash, check and read safetensors and JSON files
"""

from padfree.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
