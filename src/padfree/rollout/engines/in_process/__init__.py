"""The training process samples.

sampler          InProcessSampler: the `Sampler`
weights          PolicyModel: a model with the weights of the trained one, shared where that can be
hf_cache         write_responses: transformers' own attention and cache, on any device
decode           Decoder: lanes that are refilled, steps as CUDA graphs
cached_model     an HF model whose attention keeps its keys and values in our cache
kv_cache         the cache, and which lane has which part of it
decode_attention, draw     the two kernels of a step, each with its reference; triton_* beside them
"""
