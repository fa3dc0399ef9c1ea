"""Run benchmarks of lm-evaluation-harness (the package lm_eval) with padfree.

packed_scores    computes the log-likelihood of continuations, with many texts in one pack
harness_model    adapts a model to the interface of lm_eval: log-likelihoods and generated text
run_tasks        `padfree eval --tasks`: runs tasks and returns their results
"""
