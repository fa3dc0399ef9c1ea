"""Estimate the memory and the FLOPs of a run, before any weight is loaded.

memory        bytes on each device and on its host
activations   bytes of the activations that the forward pass keeps for the backward pass
levels        the level of activation checkpointing of each layer, chosen for a memory budget
layer_options what each level of a layer needs and costs
flops         floating-point operations of a step, and the fraction of the device's peak that they reach
cost_file     cost models that were measured on a device and saved in a file

`padfree.sizes` reads the sizes of a model.
"""
