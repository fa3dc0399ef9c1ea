"""Compile decoder layers, and save, recompute or offload their activations.

compile          torch.compile of each layer
recompute        which activations a layer saves for backward, and which are recomputed
offload          saved activations in host memory
float8           linear layers whose matmuls are computed in float8
matmuls          the registry of what counts as a matmul in a layer's graphs
compiler_watch   counts and times compilations
ops              padfree's custom operators, each with a reference in plain torch
passes           the ordered list of graph passes that insert the operators into a layer
"""
