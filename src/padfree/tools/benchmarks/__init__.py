"""Run benchmarks of lm-evaluation-harness (the package lm_eval) with padfree.

packed_scores    the log-likelihood of continuations, in packs
harness_model    the model as the package sees it: log-likelihoods and generated text
run_tasks        `padfree eval --tasks`: runs tasks and returns their results
"""
