"""Operators of our own in the graph of a compiled layer: plain torch, and the kernels beside it.

rms_norm             RMSNorm, with the residual sum before it           triton_rms_norm
qk_norm_rope         QK-norm and RoPE of one projection                 triton_qk_norm_rope
swiglu               silu(gate) · up                                    triton_swiglu
matmul_epilogues     matmuls that end in SwiGLU or in a residual sum    quack_matmul_epilogues
"""
