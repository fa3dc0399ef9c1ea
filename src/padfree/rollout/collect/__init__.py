"""Collect rollouts: from the groups of a batch to its samples.

collector          Collector: collects batches synchronously (staleness 0), or ahead of training; start reading here
queued_batch       QueuedBatch: which groups a batch samples and trains on (`rollout.filter`), and their outcomes
response_writer    ResponseWriter: single-turn episodes, sampled as one batch
sample_exchange    keeps the tokens of a sample on the rank that sampled them until another rank needs them
queue_state        checkpoint state of queued batches
batch_report       metrics of a batch; a few responses and failures in the run folder
"""
