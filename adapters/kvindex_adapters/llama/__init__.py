"""Models of the Llama family as tensors: weights, rotary embedding, one token by Triton kernels.

What the minimal decoder and `hf.attach(fused=True)` share.
"""
