"""Checkpoints: complete or not there, readable by any number of processes.

checkpointer      Checkpointer: what all ranks do together to save and to load
manifest          what a checkpoint holds, and whether it fits the model
optimizer_state   optimizer state by the names of parameters
files             safetensors and JSON: written, synced, hashed, checked and read
"""

from padfree.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
