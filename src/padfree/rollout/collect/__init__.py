"""Collect rollouts: from the groups of a batch to its samples.

collector          Collector: collects batches synchronously (staleness 0), or ahead of training; start reading here
queued_batch       QueuedBatch: which groups a batch samples and trains on (`rollout.filter`), and their outcomes
response_writer    ResponseWriter: plays single-turn episodes, whose responses are sampled as one batch
sample_exchange    keeps the tokens of a sample on the rank that sampled them until another rank needs them
queue_state        stores queued batches in a checkpoint
batch_report       writes metrics of a batch, and a few responses and failures, to the run folder
"""
