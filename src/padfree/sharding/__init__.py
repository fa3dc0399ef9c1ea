"""How a model is divided among processes.

parallelize  adapters, recompute, compile and sharding, applied to a plain model from outside
"""
