"""Run benchmarks of lm-evaluation-harness (the package lm_eval) with padfree.

packed_scores    computes the log-likelihood of continuations, many to a pack
harness_model    adapts a model to the package's interface: log-likelihoods and generated text
run_tasks        `padfree eval --tasks`: runs tasks and returns their results
"""
