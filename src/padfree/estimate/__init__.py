"""Estimates of what a run needs and does, computed before any weight is loaded.

memory bytes on each device and on its host activations the part of them that forward keeps for backward flops
floating-point operations of a step, and the fraction of the device's peak that they reach cost_file cost models that
were measured on a device and saved in a file

`padfree.sizes` reads the sizes of a model.
"""
