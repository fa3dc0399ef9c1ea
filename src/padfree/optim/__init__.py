"""Optimizers.

settings    the sections `[optimizer]` and `[schedule]`, without torch
optimizer   groups of parameters by role, each with its update rule, base learning rate and options
adamw       the update rule of embeddings, heads and vectors, or of all parameters
muon        the update rule of hidden matrices: momentum, orthogonalised
matrices    gathers the matrices of sharded parameters, each on one of the ranks that hold its shards
schedule    what base learning rates are multiplied by in each step
masters     float32 weights behind bfloat16 ones in a single process

An update rule is one file: a class with `step` and `state_bytes` (`padfree.optim.rule`).
"""

import padfree.config  # noqa: F401  it is made of the settings of the parts, so that its import must come first
