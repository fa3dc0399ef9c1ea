"""What a run will need and do, counted before any weight is loaded.

memory        bytes on each device and on its host
activations   of them, what forward keeps for backward
flops         floating-point operations of a step, and what share of the device's peak they are
cost_file     cost models that were measured on a device and kept in a file

Sizes of a model are read by `padfree.sizes`.
"""
