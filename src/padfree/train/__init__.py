"""Training: parameters, optimizer and schedule, the engine that runs a step, checkpoints, metrics."""
