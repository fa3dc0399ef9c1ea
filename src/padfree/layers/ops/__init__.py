"""padfree's custom operators for compiled layers. Each has a reference in plain torch and a file of kernels.

operator             what it computes                                   kernels
rms_norm             RMSNorm, with the residual sum before it           triton_rms_norm
qk_norm_rope         QK-norm and RoPE of one projection                 triton_qk_norm_rope
swiglu               silu(gate) · up                                    triton_swiglu
float8_linear        casts and matmuls of a linear layer in float8      triton_float8, float8_format
row_sums             sums and means in PyTorch's order                  PyTorch
matmul_epilogues     matmuls with SwiGLU or a residual add as epilogue  quack_matmul_epilogues
"""
