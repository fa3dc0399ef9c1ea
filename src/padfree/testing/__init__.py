"""Tiny models, tokenizers and data for the tests, the benchmarks, the documentation and `padfree demo`.

arithmetic     a task that two CPU cores can learn, with problems, tokenizer, model and settings
line_server    a small server that samples rollouts, for tests of `ServerApi`
models         small random models of many architectures, and packs of random tokens
vision_models  small random vision-language models, and samples with random images
vision_folders folders of tiny vision-language models, with processors
tokenizers     tokenizers of a few hundred tokens, and chat templates of several kinds

Inside padfree, only `padfree demo` imports this package.
"""
