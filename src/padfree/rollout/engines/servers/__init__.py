"""Sampling on inference servers. The code does not depend on the engine: an engine implements `ServerApi` in one file.

    trainer, rank 0     weights ──process group, or files──▶ server 0, server 1, ...   a canary verifies the transfer
    trainer, all ranks  prompts (token ids) ─────▶ the least loaded server ─────▶ token ids, log-probabilities, version

A canary is a check after every transfer: it compares log-probabilities of the server with those of the trainer.

server_api         ServerApi: the methods that an engine implements, and checks of all answers
http               base class for servers that speak JSON over HTTP
start              make_server_sampler: starts the servers of a run or connects to them, and checks them
sampler            ServerSampler: the `Sampler`
pool               load balancing, and retries of the requests of a failed server
weight_sync        sends the weights of a model, sharded or not, to the servers, bucket by bucket
weight_stream      makes the buckets: groups of whole tensors, or of differences from the last weight sync
buckets            the layout of a bucket, and the receiving side in the server
differences        encodes, applies and verifies the difference between two states of a tensor
canary             compares the log-probabilities of a server with those of the trainer
server_processes   starts, watches, restarts and stops the servers of a run
watchdog           a process between a run and its server that stops the server when the run ends, even by kill -9

All requests, probes and weight-sync calls run on one event loop in its own thread (`rollout.loop_thread`). Collectives
of the trainer stay in the main thread.
"""
