"""Rollouts from servers, whichever engine they run. What differs between engines is a `ServerApi`, one file each.

    trainer, rank 0     weights ──process group, or files──▶ server 0, server 1, ...   a canary checks that they arrived
    trainer, all ranks  prompts (token ids) ─────▶ the least loaded server ─────▶ token ids, log-probabilities, version

api            ServerApi: what an engine implements, and the checks that all answers go through
http           servers that are spoken to in JSON over HTTP
start          make_server_sampler: servers of a run, started or given, and checked
sampler        all of it as a `Sampler`
pool           which server is asked next, and what happens to the requests of one that fails
weight_sync    weights bucket by bucket, from a model that may be sharded
buckets        the form of a bucket, and the server's side of receiving it
canary         whether the server's log-probabilities are those of the trainer
launch         servers that a run starts: watching, restarts, the end
watchdog       the process between a run and its server: no server outlives the run, even one killed with -9

The sampler's event loop (`rollout.loop_thread`) has a thread of its own. All requests, probes and calls of a weight
sync run on it; collectives of the trainer stay in the main thread.
"""
