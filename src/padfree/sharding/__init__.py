"""How a model is divided among processes.

parallelize  adapters, recompute, compile and sharding, applied to a plain model from outside
rules        which parameters are sharded over which mesh
fsdp         the rules, carried out by FSDP2
norm         the norm of a gradient, each tensor by its own mesh
"""
