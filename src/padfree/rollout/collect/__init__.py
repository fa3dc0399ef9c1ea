"""Collect rollouts: from the groups of a batch to its samples.

collector          Collector: collects batches synchronously (staleness 0), or ahead of training
group              RolloutGroup: a prompt, its episodes, and their samples
queued_batch       QueuedBatch: a batch between `put` and `take`, and the outcomes of its episodes
response_writer    ResponseWriter: single-turn episodes, sampled as one batch
candidates         which groups a batch samples and trains on (`rollout.filter`)
sample_exchange    keeps the tokens of a sample on the rank that sampled them until another rank needs them
queue_state        checkpoint state of queued batches
rollout_metrics    metrics of a batch
response_examples  a few responses of each batch, and failures, in the run folder
"""
