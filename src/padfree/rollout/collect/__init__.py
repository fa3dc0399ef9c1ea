"""From the groups of a batch to its samples.

collector      Collector: in step with training (staleness 0), or batches ahead of it
group          RolloutGroup: a prompt, the episodes that answer it, and their samples
responses      ResponseWriter: episodes of one turn, sampled as one batch
candidates     which groups a batch asks for and is trained on (`rollout.filter`)
travel         samples whose tokens stay on the rank that wrote them
queue_state    what a checkpoint holds of batches ahead
metrics        the numbers of a batch
response_examples  a few responses of each batch, and failures, in the run folder
"""
