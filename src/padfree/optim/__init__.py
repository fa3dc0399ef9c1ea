"""Optimizers: update rules, parameter groups, learning-rate schedules and master weights.

optimizer_settings   the sections `[optimizer]` and `[schedule]`, without torch
optimizer            parameter groups by role, each with its update rule, base learning rate and options
rule                 the interface of an update rule
adamw                the update rule of embeddings, heads and vectors, or of all parameters
pieces               a rank's shards as plain tensors; split weights in blocks
state_format         the formats of AdamW's moments: float32, bfloat16, int8; stochastic rounding
rounded_adamw        AdamW with moments in bfloat16 or int8
reference_adamw      the update of rounded_adamw in plain PyTorch
triton_adamw         the update of rounded_adamw as one Triton kernel
muon                 the update rule of hidden matrices: orthogonalised momentum
matrices             gathers each sharded matrix on one of the ranks that hold its shards
schedule             the learning-rate factor of each step
master_weights       float32 master weights in a single process: bfloat16 compute copies and their rounding errors

An update rule is one file: a class with `step` and `state_bytes` (`padfree.optim.rule`).
"""

import padfree.config  # noqa: F401  must be imported first, because it imports the settings of this package
