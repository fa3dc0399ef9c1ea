"""Optimizers.

settings    the sections `[optimizer]` and `[schedule]`, without torch
schedule    what base rates are multiplied by in each step
masters     float32 weights behind bfloat16 ones in a single process
optimizer   AdamW, gradient norm and clipping over shards
"""
