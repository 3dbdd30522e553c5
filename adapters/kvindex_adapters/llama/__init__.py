"""Models of the Llama family as tensors: weights, rotary embedding, and a fused forward pass.

The minimal decoder and `hf.attach(fused=True)` use these modules.
"""
