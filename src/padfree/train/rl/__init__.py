"""What RL adds to a training step.

advantages        rewards to advantages
reference_model   the model that the KL term compares with, and its refreshes
update_batch      a batch between its updates, and in a checkpoint
"""
