"""Shard a model over processes.

parallelize  adapters, recomputation, compilation and sharding, applied to a plain model from outside
rules        which parameters are sharded over which mesh
fsdp         applies the rules with FSDP2
norm         the gradient norm of parameters on different meshes
"""
