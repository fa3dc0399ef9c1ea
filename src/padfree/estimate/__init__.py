"""What a run will need and do, counted before any weight is loaded.

memory      bytes on each device and on its host
flops       floating-point operations of a step, and what share of the device's peak they are
cost_file   cost models that were measured on a device and kept in a file
"""
