"""Models of the Llama family as plain tensors: weights, rotary embedding, and a fused forward pass.

The minimal decoder and `hf.attach(fused=True)` use these modules.
"""
