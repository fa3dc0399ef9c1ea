"""Tiny models, tokenizers and data that the tests, the benchmarks, the documentation and `padfree demo` share.

arithmetic     a task that two CPU cores can learn: problems with answers, a tokenizer, a model, settings to train it
line_server    a small server engine, the second one behind `ServerApi`
models         small random models of many architectures, and packs of random tokens
tokenizers     tokenizers of a few hundred tokens, and chat templates of several kinds

No other part of padfree imports this one (`tests/test_layers.py`).
"""
