"""Optimizers: update rules, parameter groups, learning-rate schedules and master weights.

optimizer         the parameter groups
rule              the interface of an update rule
adamw, muon       the update rules
state_format      the formats of AdamW's moments: float32, bfloat16 and int8
rounded_adamw     AdamW with moments in bfloat16 or int8
matrices          gathers whole matrices for Muon
schedule          the learning-rate factor of each step
master_weights    float32 master weights in a single process
"""

import padfree.config  # noqa: F401  must be imported first, because it imports the settings of this package
