"""Compiled decoder layers.

compile          torch.compile of each layer, and what a compiled layer keeps for its backward pass
recompute        activations of layers that are not compiled, computed again in backward
offload          activations that wait in the host's memory
compiler_watch   how often the compiler ran, and for how long
ops              operators of our own, each with its reference
passes           graph passes that put them into a layer's graph
"""
