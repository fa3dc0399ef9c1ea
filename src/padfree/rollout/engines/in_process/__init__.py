"""Sampling in the training process. A slot holds one response that is being sampled.

sampler           InProcessSampler: the `Sampler`
policy_model      PolicyModel: a model with the weights of the trained one
hf_cache          sampling with the attention and cache of transformers, on any device
decode            Decoder: continuous batching with CUDA graphs
slot_schedule     assigns requests to slots
decode_steps      prefill and decode steps
cached_model      an HF model whose attention uses padfree's KV cache
kv_cache          the KV cache and its allocator
kept_buffers      the ids that top-k and top-p leave for each token
decode_attention  attention of a decode step
decode_experts    MoE experts of a decode step
sample_token      samples the tokens of a decode step
exact_*           log-probabilities that are bitwise equal to the trainer's (`rollout.exact`)
row_trial         batch sizes at which matmuls give the trainer's bits
triton_*          kernels
"""
