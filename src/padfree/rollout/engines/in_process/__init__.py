"""Sampling in the training process. A slot holds one response that is being sampled.

sampler           InProcessSampler: the `Sampler`
policy_model      PolicyModel: a model with the weights of the trained one, which it shares if possible
hf_cache          write_responses: sampling with the attention and cache of transformers, on any device
decode            Decoder: continuous batching with decode slots and CUDA graphs
slot_schedule     assigns requests to slots, on the host
decode_steps      prefill and decode steps, on the device
cached_model      an HF model whose attention uses padfree's KV cache
kv_cache          the KV cache and its allocator
kept_buffers      the kept sets (ids from which a token was sampled) of a truncated softmax
decode_attention  attention of a decode step: operator and reference; triton_decode_attention is the kernel
decode_experts    experts with grouped matmuls: operator and reference; triton_grouped_linear is the kernel
sample_token      samples the tokens of a decode step: reference; triton_sample_token is the kernel
exact_operators   whether log-probabilities are bitwise equal to the trainer's, and if not, why (`rollout.exact`)
exact_attention   attention of a decode step with the trainer's kernel
row_trial         finds the batch sizes at which matmuls give the same bits as in the trainer's packs
sampled_tokens    definitions shared by the kernels and their references
"""
