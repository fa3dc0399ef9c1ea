"""Optimizers: update rules, parameter groups, learning-rate schedules and master weights.

optimizer_settings   the sections `[optimizer]` and `[schedule]`, without torch
optimizer            the parameter groups, each with its update rule, base learning rate and options
rule                 the interface of an update rule
adamw                the update rule of all parameters, or of those that Muon does not train
pieces               passes this rank's shards of parameters to AdamW, as plain tensors
state_format         the formats of AdamW's moments: float32, bfloat16 and int8 with stochastic rounding
rounded_adamw        AdamW with moments in bfloat16 or int8
reference_adamw      the update of rounded_adamw in plain PyTorch
triton_adamw         the update of rounded_adamw as one Triton kernel
muon                 the update rule of hidden matrices (weights inside layers): orthogonalised momentum
matrices             gathers each sharded matrix on one of the ranks that hold its shards
schedule             the learning-rate factor of each step
master_weights       float32 master weights, if a single process trains

An update rule is one file: a class with `step` and `state_bytes` (`padfree.optim.rule`).
"""

import padfree.config  # noqa: F401  must be imported first, because it imports the settings of this package
