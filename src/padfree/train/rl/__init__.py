"""Parts of training that only RL uses.

reference_model    the reference model of the KL term, and its refreshes
reward_model       a reward model as the reward of rollouts
run_response_log   the log of sampled responses, cleared when a checkpoint covers them
"""
