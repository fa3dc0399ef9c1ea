"""Sampling on inference servers. An engine implements `ServerApi` in one file; all other code works with any engine.

    trainer, rank 0      weights ──▶ all servers
    trainer, all ranks   prompts (token ids) ──▶ least loaded server ──▶ token ids, log-probabilities, version

start              starts the servers of a run, or connects to them
sampler            ServerSampler: the `Sampler`
pool               balances the load, and retries failed requests
weight_sync        sends the weights of a model to the servers
canary             checks after a weight sync that server and trainer compute the same log-probabilities
server_processes   starts, watches, restarts and stops servers

All calls to servers run on one event loop in its own thread (`rollout.loop_thread`). Collectives stay in the main
thread.
"""
