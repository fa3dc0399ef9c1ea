"""Checkpoints: complete or not there, readable by any number of processes.

checkpointer   Checkpointer: what all ranks do together to save and to load
manifest       the files of one checkpoint: what they hold, how they are written, checked and read
"""

from padfree.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
