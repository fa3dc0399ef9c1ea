"""Shard a model over processes.

parallelize  prepares a Hugging Face model for training: adapters, recomputation, compilation, sharding
rules        decides which parameters are sharded over which mesh
experts      expert parallelism: sends tokens to the ranks of their experts
fsdp         applies the rules with FSDP2
norm         computes the gradient norm if parameters are on different meshes
"""
