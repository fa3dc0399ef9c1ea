"""What makes compiling cheap in tests, and leaves what is compiled as it is. Ranks have it, too."""

from __future__ import annotations

import gc

import torch
import torch._dynamo.config as dynamo
import torch._dynamo.guards as guards
import torch._inductor.config as inductor

inductor.cpp.simdlen = 1  # the same code on every processor, which g++ translates a quarter faster

if torch.version.cuda is None:
    inductor.compile_threads = 1  # others are processes that import torch first: too much for small kernels of g++

# It measures, for a log, how long the guards of a graph take, and empties the processor's caches before.
guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]

# Where lengths are variables, the compiler's cache of shapes takes longer than working them out again.
dynamo.fake_tensor_cache_enabled = False

# Graphs are many small objects: Python would look at everything imported for each few thousand of them.
gc.set_threshold(50_000, 20, 100)
