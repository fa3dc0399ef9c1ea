"""Shard a model over processes.

parallelize  adapters, recomputation, compilation and sharding, applied to a plain model from outside
rules        which parameters are sharded over which mesh
experts      expert parallelism: the rule, and the forward that sends tokens to their experts
fsdp         applies the rules with FSDP2
norm         the gradient norm of parameters on different meshes
"""
