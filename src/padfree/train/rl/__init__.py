"""Additions for RL.

reference_model    the reference model of the KL term, and its refreshes
reward_model       a reward model as the reward of rollouts
run_response_log   the response log, kept in step with checkpoints
sampled_batches    batches of rollouts, sampled on demand or ahead of training
"""
