"""The attention layer: it stores old tokens in an index and new tokens in a window."""

from kvindex.layer.attention_layer import AttentionLayer

__all__ = ["AttentionLayer"]
