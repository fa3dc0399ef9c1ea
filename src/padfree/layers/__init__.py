"""Compiled decoder layers.

compile          torch.compile of each layer
recompute        what a layer saves for backward, and what backward computes again
offload          saved activations in host memory
compiler_watch   how often the compiler ran, and for how long
ops              operators of our own, each with its reference in plain torch
passes           the ordered list of graph passes that put them into a layer
"""
